//! Hidden states and probes from outside: which tokens are read, that equal tokens
//! give equal bits, that a study leaves nothing behind, and what is refused.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{data, engine, smollm2};
use forkpoint_engine::probe::{Examples, Learned, Probe};
use forkpoint_engine::{
    Conversation, Criteria, Engine, EngineError, Generation, Message, Options, Question, Role, Rung,
    Sampling, Span, Verdict,
};

fn tiny(options: &Options) -> Engine {
    engine(&data("qwen3-tiny"), options)
}

fn user(text: &str) -> Message {
    Message::new(Role::User, text)
}

fn talk(turns: &[Message]) -> Conversation {
    Conversation { messages: turns.to_vec(), tools: vec![] }
}

fn yes_or_no(instructions: &str) -> Question {
    Question { instructions: instructions.into(), criteria: Criteria::Boolean { yes: None, no: None } }
}

/// Twenty examples of two words that even a random model tells apart.
fn examples() -> Examples {
    let lines: Vec<String> = (0..20)
        .map(|i| {
            let (word, label) =
                if i % 2 == 0 { ("delete the file ", "yes") } else { ("tell me a story ", "no") };
            format!("{{\"text\": \"{}{i}\", \"label\": \"{label}\"}}", word.repeat(2))
        })
        .collect();
    Examples::parse(&lines.join("\n")).unwrap()
}

async fn learn(engine: &Engine) -> Learned {
    engine.learn(examples(), |_| {}).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_tokens_give_equal_features_however_they_came_to_be() {
    let cold = tiny(&Options::default());
    let other = tiny(&Options { chunk: 7, threads: 1, ..Options::default() });
    let turns = [
        user(&"A long beginning. ".repeat(20)),
        Message::new(Role::Assistant, "Yes?"),
        user(&"What the last turn says, over more than a page of tokens. ".repeat(3)),
    ];
    for engine in [&cold, &other] {
        engine.keep_hidden(&[1, 3]).await.unwrap();
    }
    let spans = [Span::Session, Span::LastUser, Span::Since(37), Span::Last(1), Span::Last(20)];
    let first = cold.open(talk(&turns), "").await.unwrap();
    // Beside others in one step, in chunks of seven.
    let beside = other.open(talk(&[user("Something else altogether.")]), "").await.unwrap();
    let noise = beside.logits(&[1, 2, 3]);
    let batched = other.open(talk(&turns), "");
    let (_, batched) = tokio::join!(noise, batched);
    let batched = batched.unwrap();
    // Grown turn by turn, and forked on the way.
    let mut grown = other.open(talk(&turns[..1]), "other").await.unwrap();
    grown.append(&turns[1..2]).await.unwrap();
    let mut grown = grown.fork().await.unwrap();
    grown.append(&turns[2..]).await.unwrap();
    for span in spans {
        let expected = first.features(span, &[1, 3]).await.unwrap();
        assert_eq!(expected.len(), 2);
        assert_eq!(expected[0].len(), cold.model().width);
        assert_ne!(expected[0], expected[1], "layers differ");
        let warm = cold.open(talk(&turns), "").await.unwrap();
        assert!(warm.usage().reused > 0);
        for session in [&warm, &first.fork().await.unwrap(), &batched, &grown] {
            assert!(session.features(span, &[1, 3]).await.unwrap() == expected, "{span:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn features_survive_eviction_and_come_back_with_the_tokens() {
    // Room for little more than one of the conversations.
    let page = tiny(&Options::default()).model().page_bytes as u64;
    let engine = tiny(&Options { kv_memory: 40 * page, ..Options::default() });
    engine.keep_hidden(&[2]).await.unwrap();
    let [a, b] = ["First. ", "Other. "].map(|word| talk(&[user(&word.repeat(90))]));
    let expected = engine.open(a.clone(), "").await.unwrap().features(Span::LastUser, &[2]).await.unwrap();
    drop(engine.open(b, "").await.unwrap());
    assert!(engine.counters().evictions > 0);
    let again = engine.open(a, "").await.unwrap();
    assert!(again.usage().computed > 0);
    assert!(again.features(Span::LastUser, &[2]).await.unwrap() == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_user_turn_is_its_own_words_and_no_others() {
    let engine = tiny(&Options::default());
    engine.keep_hidden(&[1]).await.unwrap();
    // The tokens of the words alone, counted from the session's end.
    let text = "remove all of it";
    let session =
        engine.open(talk(&[Message::new(Role::System, "Be brief."), user(text)]), "").await.unwrap();
    let expected = session.features(Span::LastUser, &[1]).await.unwrap();
    let words = engine.count_tokens(text) as u32;
    let tokens = session.usage().tokens;
    let alone = |from: u32, count: u32| {
        let session = &session;
        async move {
            // The sum over a span is that of its ends' spans apart.
            let [long, short] = [from, from + count].map(Span::Since);
            let (a, b) = (session.features(long, &[1]).await, session.features(short, &[1]).await);
            (a.unwrap().remove(0), b.ok().map(|mut b| b.remove(0)))
        }
    };
    let mut found = 0;
    for from in 0..tokens - words {
        let (long, short) = alone(from, words).await;
        let Some(short) = short else { continue };
        let (n, m) = ((tokens - from) as f32, (tokens - from - words) as f32);
        let mean: Vec<f32> = long.iter().zip(&short).map(|(l, s)| (l * n - s * m) / words as f32).collect();
        let near = mean.iter().zip(&expected[0]).all(|(a, b)| (a - b).abs() < 1e-3 * (1.0 + b.abs()));
        found += usize::from(near);
    }
    assert_eq!(found, 1, "one place in the session has the words' mean");
    // Whatever follows, and whatever is said of the same words elsewhere.
    let mut longer =
        engine.open(talk(&[Message::new(Role::System, "Be brief."), user(text)]), "").await.unwrap();
    longer.append(&[Message::new(Role::Assistant, text)]).await.unwrap();
    assert!(longer.features(Span::LastUser, &[1]).await.unwrap() == expected);
    let sampling = Sampling { temperature: 0.0, max_tokens: Some(3), ..Sampling::default() };
    longer.draft(sampling).await.unwrap();
    assert!(longer.features(Span::LastUser, &[1]).await.unwrap() == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_said() {
    let engine = tiny(&Options::default());
    let before = engine.open(talk(&[user("Hello.")]), "").await.unwrap();
    assert!(matches!(before.features(Span::Session, &[1]).await, Err(EngineError::NoHidden)));
    let error = engine.keep_hidden(&[4]).await.unwrap_err().to_string();
    assert_eq!(error, "there is no layer 4, the model has 1 to 3");
    engine.keep_hidden(&[1]).await.unwrap();
    assert!(matches!(before.features(Span::Session, &[1]).await, Err(EngineError::NoHidden)));
    // Nor does a new session find the old one's pages.
    let after = engine.open(talk(&[user("Hello.")]), "").await.unwrap();
    assert_eq!(after.usage().reused, 0);
    assert!(after.features(Span::Session, &[1]).await.is_ok());
    // More layers make a new set: who began with the old one cannot be read any more.
    engine.keep_hidden(&[2]).await.unwrap();
    assert!(matches!(after.features(Span::Session, &[1]).await, Err(EngineError::NoHidden)));
    let after = engine.open(talk(&[user("Hello.")]), "").await.unwrap();
    assert!(after.features(Span::Session, &[1, 2]).await.is_ok());
    let none = Span::Since(after.usage().tokens);
    assert!(matches!(after.features(none, &[1]).await, Err(EngineError::Invalid(_))));
    let silent = engine.open(talk(&[Message::new(Role::System, "Hello.")]), "").await.unwrap();
    assert!(matches!(silent.features(Span::LastUser, &[1]).await, Err(EngineError::Invalid(_))));
    let plain = engine.open_text("Hello.", "").await.unwrap();
    assert!(matches!(plain.features(Span::LastUser, &[1]).await, Err(EngineError::Invalid(_))));
    let mut shallow = engine.study_features(talk(&[user("Hello.")])).await.unwrap();
    assert!(matches!(shallow.decide(&[yes_or_no("Is it?")]).await, Err(EngineError::Invalid(_))));
    assert!(matches!(shallow.generate(Generation::default()).await, Err(EngineError::Invalid(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_study_sees_what_a_request_would_and_leaves_nothing() {
    let engine = tiny(&Options::default());
    engine.keep_hidden(&[2]).await.unwrap();
    let conversation = talk(&[user(&"Studied. ".repeat(30))]);
    let served = engine.open(conversation.clone(), "").await.unwrap();
    let expected = served.features(Span::LastUser, &[2]).await.unwrap();
    drop(served);
    let before = engine.counters();
    let studied = engine.study_features(conversation.clone()).await.unwrap();
    assert_eq!(studied.usage().reused, 0, "a study finds no tenant's pages");
    assert!(studied.features(Span::LastUser, &[2]).await.unwrap() == expected);
    let mut deep = engine.study(conversation.clone()).await.unwrap();
    assert!(deep.features(Span::LastUser, &[2]).await.unwrap() == expected);
    let question = [yes_or_no("Is it long?")];
    let mut again = engine.open(conversation, "").await.unwrap();
    assert_eq!(deep.decide(&question).await.unwrap(), again.decide(&question).await.unwrap());
    drop((studied, deep, again));
    while engine.counters().sessions > 0 {
        drop(engine.open(talk(&[user("Hello.")]), "").await.unwrap());
    }
    let after = engine.counters();
    assert!(after.studied_tokens > before.studied_tokens);
    assert_eq!(after.decisions, before.decisions + 1, "a study's decisions are not counted");
    // The request's pages, its question's and a greeting's; the studies' would be as many again.
    let most = before.prefill_tokens / 16 + 12;
    assert!(after.pages_cached <= most, "{before:?} {after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_while_a_study_runs() {
    let engine = tiny(&Options::default());
    engine.keep_hidden(&[2]).await.unwrap();
    let learning = {
        let engine = engine.clone();
        let lines: Vec<String> = (0..200)
            .map(|i| format!("{{\"text\": \"{} {i}\", \"label\": {}}}", "many words ".repeat(40), i % 2 == 0))
            .collect();
        let examples = Examples::parse(&lines.join("\n")).unwrap();
        tokio::spawn(async move { engine.learn(examples, |_| {}).await.map(|learned| learned.fit()) })
    };
    let mut served = 0;
    while !learning.is_finished() {
        let mut session = engine.open(talk(&[user(&format!("Request {served}."))]), "").await.unwrap();
        session.decide(&[yes_or_no("Is it?")]).await.unwrap();
        served += 1;
    }
    assert!(served > 3, "{served} requests");
    learning.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_study_that_wants_all_pages_keeps_no_request_waiting() {
    let page = tiny(&Options::default()).model().page_bytes as u64;
    let patience = Duration::from_secs(20);
    let engine = tiny(&Options { kv_memory: 80 * page, patience, ..Options::default() });
    engine.keep_hidden(&[2]).await.unwrap();
    // Each example alone takes a quarter of the arena, and eight are read at once.
    let learning = {
        let engine = engine.clone();
        let lines: Vec<String> = (0..24)
            .map(|i| format!("{{\"text\": \"{} {i}\", \"label\": {}}}", "many words ".repeat(60), i % 2 == 0))
            .collect();
        let examples = Examples::parse(&lines.join("\n")).unwrap();
        tokio::spawn(async move { engine.learn(examples, |_| {}).await.map(|learned| learned.fit()) })
    };
    let mut slowest = Duration::ZERO;
    for request in 0..30 {
        let started = Instant::now();
        // Half of the arena, and forks of it.
        let text = format!("{request} {}", "a request ".repeat(100));
        let mut session = engine.open(talk(&[user(&text)]), "").await.unwrap();
        session.decide(&[yes_or_no("Is it?"), yes_or_no("Is it not?")]).await.unwrap();
        slowest = slowest.max(started.elapsed());
    }
    assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    learning.await.unwrap().unwrap();
    while engine.counters().sessions > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(engine.counters().pages_held, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_answers_without_a_token_and_the_same_each_time() {
    let engine = tiny(&Options::default());
    let learned = learn(&engine).await;
    let probe = Arc::new(learned.fit());
    assert!(probe.quality.accuracy > 0.9, "{:?}", probe.quality);
    assert!(probe.fits(engine.model()));
    assert_eq!(*probe, learn(&tiny(&Options::default())).await.fit(), "the fit is deterministic");

    let mut session = engine.open(talk(&[user("delete the file delete the file 77")]), "").await.unwrap();
    let questions = [yes_or_no("Would it destroy?"), yes_or_no("Is it long?")];
    let before = engine.counters();
    let answers = session.decide_by(&questions[..1], &[Some(probe.clone())]).await.unwrap();
    assert_eq!((answers[0].rung, session.usage().decided), (Rung::Probe, 0));
    assert!(matches!(answers[0].verdict, Verdict::Boolean(yes) if yes > 0.5), "{answers:?}");
    let after = engine.counters();
    assert_eq!(
        (after.prefill_tokens, after.decided_tokens, after.studied_tokens),
        (before.prefill_tokens, before.decided_tokens, before.studied_tokens)
    );
    // Beside label reads, in any order, cold and forked, loaded from its file.
    let loaded = Arc::new(Probe::from_json(&probe.to_json()).unwrap());
    let mixed = session.decide_by(&questions, &[None, Some(loaded)]).await.unwrap();
    assert_eq!(mixed.iter().map(|answer| answer.rung).collect::<Vec<_>>(), [Rung::Labels, Rung::Probe]);
    assert_eq!(mixed[1], answers[0]);
    assert_eq!(mixed[0], session.decide(&questions[..1]).await.unwrap()[0]);
    let mut fork = session.fork().await.unwrap();
    assert_eq!(fork.decide_by(&questions[..1], &[Some(probe.clone())]).await.unwrap(), answers);
    // A session that has grown is read anew.
    fork.append(&[user("tell me a story tell me a story 5")]).await.unwrap();
    let story = fork.decide_by(&questions[..1], &[Some(probe.clone())]).await.unwrap();
    assert_ne!(story, answers);

    let other =
        Question { criteria: Criteria::Score(vec!["low".into(), "high".into()]), ..questions[0].clone() };
    let error = session.decide_by(&[other], &[Some(probe)]).await.unwrap_err().to_string();
    assert_eq!(
        error,
        "question 0: the probe answers a boolean of yes, no, it was asked a score of low, high"
    );
}

/// The default model tells a few plain requests apart, from few examples.
#[tokio::test(flavor = "multi_thread")]
async fn smollm2_learns_a_question_that_its_label_reads_get_wrong() {
    let engine = engine(&smollm2(), &Options::default());
    let text = std::fs::read_to_string(data("probes/shell.jsonl")).unwrap();
    let plain: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("{\"probe\"") || line.contains("\"plain\"]"))
        .filter(|line| line.len() < 200)
        .collect();
    let examples = Examples::parse(&plain.join("\n")).unwrap();
    let reads = engine.read_labels(&examples, 24).await.unwrap().unwrap().quality(&examples);
    let learned = engine.learn(examples, |_| {}).await.unwrap();
    let [fit, held_out] = learned.halves().unwrap();
    let quality = held_out.evaluate(&fit.fit()).quality;
    assert!(quality.accuracy >= 0.8, "{quality:?}");
    assert!(quality.accuracy > reads.accuracy + 0.1, "{} against {}", quality.accuracy, reads.accuracy);
}
