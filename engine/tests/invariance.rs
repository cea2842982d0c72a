//! The same tokens give the same logits, bit for bit, whatever happened before
//! and whoever shares the step.

mod common;

use common::{data, engine, smollm2};
use forkpoint_engine::{
    ChoiceOption, Conversation, Criteria, Engine, Generation, Message, Options, Question, Role, Sampling,
};

/// Tokens without a pattern; `seed` tells prompts apart.
fn tokens(seed: u32, count: usize, vocab: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocab
    };
    (0..count).map(|_| next()).collect()
}

async fn cold(engine: &Engine, prompt: &[u32], salt: &str) -> Vec<f32> {
    engine.open_tokens(prompt, salt).await.unwrap().logits(&[]).await.unwrap()
}

fn with_chunk(chunk: usize) -> Options {
    Options { chunk, ..Options::default() }
}

/// Prompts of several pages and a split of keys, one ending at a page's edge.
const LENGTHS: [usize; 3] = [37, 160, 700];

#[tokio::test(flavor = "multi_thread")]
async fn chunks_of_any_size_give_the_same_logits() {
    let whole = engine(&smollm2(), &with_chunk(512));
    let vocab = whole.model().vocab as u32;
    for chunk in [1, 3, 16, 64, 200] {
        let chunked = engine(&smollm2(), &with_chunk(chunk));
        for length in LENGTHS.into_iter().filter(|length| length / chunk < 300) {
            let prompt = tokens(length as u32, length, vocab);
            let expected = cold(&whole, &prompt, "").await;
            assert!(cold(&chunked, &prompt, "").await == expected, "{length} tokens in chunks of {chunk}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn warm_and_forked_sessions_give_the_same_logits() {
    let engine = engine(&smollm2(), &Options::default());
    let vocab = engine.model().vocab as u32;
    for length in LENGTHS {
        let prompt = tokens(length as u32, length, vocab);
        let expected = cold(&engine, &prompt, "one tenant").await;
        // The whole prompt is resident now; the tip is computed once more.
        let warm = engine.open_tokens(&prompt, "one tenant").await.unwrap();
        assert_eq!(warm.usage().computed, 0);
        assert!(warm.logits(&[]).await.unwrap() == expected, "{length} tokens, warm");
        // Grown from a beginning that ends anywhere in a page.
        for at in [1, 15, 16, 17, length / 2, length - 1] {
            let base = engine.open_tokens(&prompt[..at], "one tenant").await.unwrap();
            let forked = base.fork().await.unwrap();
            assert!(forked.logits(&prompt[at..]).await.unwrap() == expected, "forked at {at} of {length}");
        }
        assert!(cold(&engine, &prompt, "another tenant").await == expected, "{length} tokens, cold again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_in_the_same_steps_change_nothing() {
    let engine = engine(&smollm2(), &Options::default());
    let vocab = engine.model().vocab as u32;
    let prompts: Vec<Vec<u32>> = (0..8).map(|seed| tokens(seed, 20 + 61 * seed as usize, vocab)).collect();
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(cold(&engine, prompt, "alone").await);
    }
    // Replies are being written meanwhile.
    let talk = Conversation { messages: vec![Message::new(Role::User, "Count to fifty.")], tools: vec![] };
    let session = engine.open(talk, "").await.unwrap();
    let sampling = Sampling { max_tokens: Some(60), seed: Some(1), ..Sampling::default() };
    let generation = Generation { sampling, ..Generation::default() };
    let quiet = session.generate(generation.clone()).await.unwrap().complete().await.unwrap();
    let busy = session.generate(generation).await.unwrap();
    let together: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let (engine, prompt) = (engine.clone(), prompt.clone());
            tokio::spawn(async move { cold(&engine, &prompt, "together").await })
        })
        .collect();
    for (number, (task, expected)) in together.into_iter().zip(&alone).enumerate() {
        assert!(task.await.unwrap() == *expected, "prompt {number} beside strangers");
    }
    assert_eq!(busy.complete().await.unwrap(), quiet, "a reply beside strangers");
}

fn questions() -> Vec<Question> {
    let option = |name: &str| ChoiceOption { name: name.into(), description: Some(format!("about {name}")) };
    let ask = |instructions: &str, criteria| Question { instructions: instructions.into(), criteria };
    vec![
        ask(
            "Which team should handle this?",
            Criteria::Choice(["billing", "shipping", "human"].map(option).into()),
        ),
        ask("Is the customer angry?", Criteria::Boolean { yes: None, no: None }),
        ask("How urgent is this?", Criteria::Score(["low", "normal", "high"].map(Into::into).into())),
        ask("Does it name an order?", Criteria::Boolean { yes: Some("an order is named".into()), no: None }),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_move_no_neighbour_in_any_order() {
    for checkpoint in [smollm2(), data("qwen3-tiny")] {
        let engine = engine(&checkpoint, &Options::default());
        let talk = Conversation {
            messages: vec![Message::new(Role::User, "Where is my parcel? Order 4711, three weeks late!")],
            tools: vec![],
        };
        let questions = questions();
        let mut session = engine.open(talk.clone(), "").await.unwrap();
        let together = session.decide(&questions).await.unwrap();
        for (question, expected) in questions.iter().zip(&together) {
            let alone = session.decide(std::slice::from_ref(question)).await.unwrap();
            assert_eq!(alone, std::slice::from_ref(expected), "{}", question.instructions);
        }
        let reversed: Vec<Question> = questions.iter().rev().cloned().collect();
        let mut answers = session.decide(&reversed).await.unwrap();
        answers.reverse();
        assert_eq!(answers, together, "reversed");
        let mut cold = engine.open(talk, "another tenant").await.unwrap();
        assert_eq!(cold.decide(&questions).await.unwrap(), together, "cold");
        // More than a step holds at once.
        let many: Vec<Question> = questions.iter().cycle().take(40).cloned().collect();
        let expected: Vec<_> = together.iter().cycle().take(40).cloned().collect();
        assert_eq!(session.decide(&many).await.unwrap(), expected, "forty at once");
    }
}
