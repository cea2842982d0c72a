//! Sessions from outside: what is reused, what is computed, what is refused,
//! and that pages come back.

mod common;

use std::cell::RefCell;
use std::time::{Duration, Instant};

use common::{data, engine, smollm2};
use forkpoint_engine::{
    Conversation, Criteria, Engine, EngineError, Event, FinishReason, Generation, Message, Options, Question,
    Role, Sampling, Session,
};

fn tiny(options: &Options) -> Engine {
    engine(&data("qwen3-tiny"), options)
}

fn talk(text: &str) -> Conversation {
    Conversation { messages: vec![Message::new(Role::User, text)], tools: vec![] }
}

fn yes_or_no(instructions: &str) -> Question {
    Question { instructions: instructions.into(), criteria: Criteria::Boolean { yes: None, no: None } }
}

fn greedy(max_tokens: u32) -> Sampling {
    Sampling { temperature: 0.0, max_tokens: Some(max_tokens), ..Sampling::default() }
}

fn reply(max_tokens: u32) -> Generation {
    Generation { sampling: greedy(max_tokens), ..Generation::default() }
}

/// Waits until no live session holds a page.
async fn all_pages_back(engine: &Engine) {
    for _ in 0..200 {
        let counters = engine.counters();
        if counters.pages_held == 0 && counters.sessions == 0 && counters.waiting == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("pages are still held: {:?}", engine.counters());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_computes_its_suffixes_and_a_reply_its_opening() {
    let engine = tiny(&Options::default());
    let mut session = engine.open(talk(&"A long story. ".repeat(60)), "").await.unwrap();
    let opened = session.usage();
    assert_eq!((opened.reused, opened.computed), (0, opened.tokens));
    let prefilled = engine.counters().prefill_tokens;
    assert_eq!(prefilled, u64::from(opened.tokens));

    session.decide(&[yes_or_no("Is it long?"), yes_or_no("Is it short?")]).await.unwrap();
    let decided = session.usage();
    assert_eq!((decided.tokens, decided.computed, decided.decisions), (opened.tokens, opened.computed, 2));
    // Two suffixes of one turn each: far less than the conversation.
    assert!(decided.decided > 0 && decided.decided < 160, "{decided:?}");
    let counters = engine.counters();
    assert_eq!((counters.prefill_tokens, counters.decided_tokens), (prefilled, u64::from(decided.decided)));

    let mut stream = session.generate(reply(5)).await.unwrap();
    let ended = loop {
        match stream.next().await.unwrap() {
            Event::Text { .. } => {}
            Event::End(ended) => break ended,
            Event::Failed(error) => panic!("{error}"),
        }
    };
    // The assistant's turn opens with a handful of tokens.
    assert!((1..12).contains(&ended.prompt), "{ended:?}");
    assert_eq!(engine.counters().prefill_tokens, prefilled + u64::from(ended.prompt));
    drop((session, stream));
    all_pages_back(&engine).await;

    let again = engine.open(talk(&"A long story. ".repeat(60)), "").await.unwrap();
    assert_eq!((again.usage().reused, again.usage().computed), (opened.tokens, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_are_added_without_a_second_prefill() {
    let engine = tiny(&Options::default());
    let mut session = engine.open(talk(&"Once more. ".repeat(40)), "").await.unwrap();
    let before = session.usage();
    let tokens = session
        .append(&[Message::new(Role::Assistant, "Yes."), Message::new(Role::User, "And?")])
        .await
        .unwrap();
    let after = session.usage();
    assert_eq!(after.tokens, tokens);
    assert_eq!(after.computed - before.computed, after.tokens - before.tokens);
    // A draft is an assistant turn that the session holds.
    let draft = session.draft(greedy(6)).await.unwrap();
    let last = session.conversation().messages.last().unwrap();
    assert_eq!((last.role, &last.content), (Role::Assistant, &draft.text));
    // The whole, opened anew, has the same answers.
    let question = [yes_or_no("Is it over?")];
    let warm = session.decide(&question).await.unwrap();
    let whole = session.conversation().clone();
    let mut cold = engine.open(whole, "another tenant").await.unwrap();
    assert_eq!(cold.decide(&question).await.unwrap(), warm);
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_that_arrive_together_are_prefilled_once() {
    let engine = tiny(&Options { chunk: 32, ..Options::default() });
    // What is cached begins alike and ends inside a page: nobody starts at a page's edge.
    drop(engine.open(talk("The same"), "").await.unwrap());
    let before = engine.counters().prefill_tokens;
    let text = "The same words for everyone. ".repeat(50);
    let opens: Vec<_> = (0..6)
        .map(|_| {
            let (engine, text) = (engine.clone(), text.clone());
            tokio::spawn(async move { engine.open(talk(&text), "").await.unwrap() })
        })
        .collect();
    let mut sessions = Vec::new();
    for open in opens {
        sessions.push(open.await.unwrap());
    }
    let tokens = u64::from(sessions[0].usage().tokens);
    // Each computes its own last, unfilled page.
    let computed = engine.counters().prefill_tokens - before;
    assert!(computed < tokens + 6 * 16, "{computed} for {tokens}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_takes_decisions_replies_and_prefill_at_their_most() {
    let engine = tiny(&Options { chunk: 4, ..Options::default() });
    let mut session = engine.open(talk("Hello"), "").await.unwrap();
    let mut replies = Vec::new();
    for _ in 0..6 {
        replies.push(session.generate(reply(400)).await.unwrap());
    }
    let other = engine.clone();
    let prefill = tokio::spawn(async move { other.open(talk(&"And on. ".repeat(100)), "").await });
    let questions: Vec<Question> = (0..40).map(|n| yes_or_no(&format!("Is it {n}?"))).collect();
    assert_eq!(session.decide(&questions).await.unwrap().len(), 40);
    prefill.await.unwrap().unwrap();
    assert!(engine.is_running());
    drop((session, replies));
    all_pages_back(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_is_one_call_however_much_it_asks() {
    let engine = tiny(&Options { queue: 4, chunk: 8, ..Options::default() });
    let mut session = engine.open(talk("Hello"), "").await.unwrap();
    let questions: Vec<Question> = (0..60).map(|n| yes_or_no(&format!("Is it {n}?"))).collect();
    let (answers, opened) = tokio::join!(session.decide(&questions), engine.open(talk("Hi"), ""));
    assert_eq!(answers.unwrap().len(), 60);
    opened.unwrap();
}

#[tokio::test]
async fn a_decision_that_has_begun_is_answered_before_those_behind_it() {
    let engine = engine(&smollm2(), &Options { chunk: 32, ..Options::default() });
    let mut first = engine.open(talk("Hello"), "").await.unwrap();
    let mut second = engine.open(talk("Hi"), "").await.unwrap();
    let question = |words| yes_or_no(&format!("Does it say {}?", "this and that, ".repeat(words)));
    // In steps of 64 rows, each of which lasts far longer than an answer's way. Neither ends in a step with the other: of
    // the second more is left than goes along.
    let answered = RefCell::new(Vec::new());
    let ask = async |session: &mut Session, words| {
        session.decide(&[question(words)]).await.unwrap();
        answered.borrow_mut().push(words);
    };
    tokio::join!(biased; ask(&mut first, 60), ask(&mut second, 24));
    assert_eq!(answered.into_inner(), [60, 24]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_with_numbers() {
    let engine = tiny(&Options { context: 256, ..Options::default() });
    match engine.open(talk(&"word ".repeat(400)), "").await {
        Err(EngineError::TooLong { tokens, limit: 256 }) => assert!(tokens > 256),
        other => panic!("{other:?}"),
    }
    // A cache of few pages that a live session holds.
    let page = 16 * 2 * 2 * 64 * 8;
    let engine = tiny(&Options { kv_memory: 12 * page, ..Options::default() });
    let total = engine.counters().pages_total;
    let held = engine.open(talk(&"word ".repeat(60)), "").await.unwrap();
    match engine.open(talk(&"other ".repeat(100 * total as usize)), "").await {
        Err(EngineError::Full { .. } | EngineError::TooLong { .. }) => {}
        other => panic!("{other:?}"),
    }
    drop(held);
    all_pages_back(&engine).await;
}

/// An engine of few pages, and how many tokens they hold.
fn crowded(pages: u64, patience: Duration) -> (Engine, usize) {
    let probe = tiny(&Options::default());
    let page = probe.model().page_bytes as u64;
    (tiny(&Options { kv_memory: pages * page, patience, ..Options::default() }), pages as usize * 16)
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_wait_for_pages_that_others_hold() {
    let (engine, _) = crowded(24, Duration::from_secs(60));
    let vocab = engine.model().vocab as u32;
    // Each takes a third of the cache, and eight come at once.
    let opens = (0..8).map(|n| {
        let engine = engine.clone();
        let prompt: Vec<u32> = (0..120).map(|i| (i * 7 + n * 131 + 5) % vocab).collect();
        tokio::spawn(async move {
            let session = engine.open_tokens(&prompt, "").await?;
            let reply = session.generate(reply(4)).await?.complete().await?;
            Ok::<_, EngineError>((session.usage().tokens, reply.tokens))
        })
    });
    for open in opens.collect::<Vec<_>>() {
        let (tokens, _) = open.await.unwrap().expect("it waits for its turn");
        assert_eq!(tokens, 120);
    }
    all_pages_back(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_prompts_that_fill_the_cache_wait_for_each_other() {
    let (engine, tokens) = crowded(100, Duration::from_secs(60));
    let prompt: Vec<u32> = (0..tokens as u32 * 6 / 10).map(|i| i * 7 % engine.model().vocab as u32).collect();
    let opens = [(); 3].map(|()| {
        let (engine, prompt) = (engine.clone(), prompt.clone());
        tokio::spawn(
            async move { engine.open_tokens(&prompt, "").await.map(|session| session.usage().tokens) },
        )
    });
    let start = Instant::now();
    for open in opens {
        assert_eq!(open.await.unwrap().unwrap() as usize, prompt.len());
    }
    assert!(start.elapsed() < Duration::from_secs(30), "none waits for its patience to end");
    // Of two that begin differently, each keeps its pages cached until the other needs them.
    let other: Vec<u32> = prompt.iter().rev().copied().collect();
    for prompt in [&prompt, &other, &prompt, &other] {
        drop(engine.open_tokens(prompt, "").await.unwrap());
    }
    let (a, b) = tokio::join!(engine.open_tokens(&prompt, ""), engine.open_tokens(&other[..200], ""));
    a.unwrap();
    b.unwrap();
    all_pages_back(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn patience_ends_with_an_error() {
    let (engine, tokens) = crowded(12, Duration::from_millis(300));
    let held = engine.open_tokens(&vec![1; tokens / 2], "").await.unwrap();
    let start = Instant::now();
    match engine.open_tokens(&vec![2; tokens * 3 / 4], "").await {
        Err(EngineError::Full { pages: 9, free: 6, total: 12 }) => {}
        other => panic!("{other:?}"),
    }
    assert!(start.elapsed() >= Duration::from_millis(300), "it has waited");
    // What fits is not held up by what does not, and what ends in time is waited for.
    let (large, small, _) = tokio::join!(
        async { engine.open_tokens(&vec![2; tokens * 3 / 4], "").await.map(drop) },
        async { engine.open_tokens(&[3; 40], "").await.map(drop) },
        async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(held);
        }
    );
    large.unwrap();
    small.unwrap();
    all_pages_back(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_cache_ends_a_reply_with_an_error_and_loses_no_page() {
    let probe = tiny(&Options::default());
    let bytes_per_page = Options::default().kv_memory / probe.counters().pages_total;
    let engine = tiny(&Options { kv_memory: 10 * bytes_per_page, ..Options::default() });
    let session = engine.open_text("one two three", "").await.unwrap();
    // Whether a random model ends its reply by itself is the path's luck.
    let sampling =
        Sampling { max_tokens: Some(1000), seed: Some(3), ignore_eos: true, ..Sampling::default() };
    let streams = [0, 1, 2]
        .map(|_| session.generate(Generation { sampling: sampling.clone(), ..Generation::default() }));
    let mut failed = 0;
    let started = Instant::now();
    for stream in futures_join(streams).await {
        match stream.unwrap().complete().await {
            Err(EngineError::Full { total, .. }) => {
                assert_eq!(total, 10);
                failed += 1;
            }
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed > 0, "three long replies cannot share ten pages");
    // A second of grace, not the patience that prompts have.
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    drop(session);
    all_pages_back(&engine).await;
}

async fn futures_join<T>(futures: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut all = Vec::new();
    for future in futures {
        all.push(future.await);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_leaves_nothing_behind() {
    let engine = tiny(&Options { chunk: 4, ..Options::default() });
    // In the middle of a prefill, of a decision, of a reply.
    let open = engine.open(talk(&"Never mind. ".repeat(80)), "");
    assert!(tokio::time::timeout(Duration::from_millis(2), open).await.is_err());
    let mut session = engine.open(talk("Never mind."), "").await.unwrap();
    let questions: Vec<Question> = (0..200).map(|n| yes_or_no(&format!("Is it {n}?"))).collect();
    let decide = session.decide(&questions);
    assert!(tokio::time::timeout(Duration::from_millis(2), decide).await.is_err());
    let mut stream = session.generate(reply(10_000)).await.unwrap();
    stream.next().await.unwrap();
    drop((stream, session));
    all_pages_back(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_ends_where_it_should() {
    let engine = tiny(&Options { context: 128, ..Options::default() });
    let session = engine.open(talk("Hello"), "").await.unwrap();
    let seeded = |max_tokens, stop: &[&str]| Generation {
        sampling: Sampling {
            seed: Some(5),
            max_tokens,
            stop: stop.iter().map(|&s| s.into()).collect(),
            ..Sampling::default()
        },
        ..Generation::default()
    };
    let run = async |generation| session.generate(generation).await.unwrap().complete().await.unwrap();
    let long = run(seeded(Some(40), &[])).await;
    let short = run(seeded(Some(3), &[])).await;
    assert_eq!((short.tokens, short.reason), (3, FinishReason::Length));
    assert!(long.text.starts_with(short.text.trim_end_matches('\u{fffd}')));
    // A string out of the reply itself, cut off with what follows it.
    let stop: String = long.text.chars().filter(|c| c.is_ascii_alphanumeric()).take(1).collect();
    let cut = run(seeded(Some(40), &[&stop])).await;
    assert_eq!(cut.reason, FinishReason::Stop);
    assert_eq!(cut.text, long.text[..long.text.find(&stop).unwrap()]);
    // Without a bound the context window ends it.
    let unbounded = run(seeded(None, &[])).await;
    assert!(unbounded.tokens <= 128);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_goes_on_past_the_end_of_a_turn_where_that_is_asked() {
    let engine = tiny(&Options::default());
    let session = engine.open(talk("Hello"), "").await.unwrap();
    let run = async |seed, ignore_eos| {
        let sampling =
            Sampling { seed: Some(seed), max_tokens: Some(400), ignore_eos, ..Sampling::default() };
        let stream = session.generate(Generation { sampling, ..Generation::default() }).await.unwrap();
        stream.complete().await.unwrap()
    };
    for seed in 0..20 {
        let ended = run(seed, false).await;
        if ended.reason == FinishReason::Stop {
            let longer = run(seed, true).await;
            assert_eq!((longer.tokens, longer.reason), (400, FinishReason::Length));
            assert!(longer.text.starts_with(ended.text.trim_end_matches('\u{fffd}')));
            return;
        }
    }
    panic!("no reply of 20 ended its turn within 400 tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_what_sessions_questions_and_replies_compute() {
    let engine = tiny(&Options::default());
    let (asked, questions) = (talk("Hello there"), [yes_or_no("Is it?"), yes_or_no("Is it really?")]);
    let prompt = engine.prompt(&asked, &questions).unwrap();
    assert_eq!(engine.counters().prefill_tokens, 0);
    for (question, tokens) in questions.iter().zip(&prompt.questions) {
        let mut session = engine.open(asked.clone(), "").await.unwrap();
        session.decide(std::slice::from_ref(question)).await.unwrap();
        let usage = session.usage();
        assert_eq!((usage.tokens as usize, usage.decided as usize), (prompt.session.len(), tokens.len()));
    }
    // The same tokens as a text, so the same logits.
    let session = engine.open(asked, "").await.unwrap();
    let whole = engine.open_tokens(&prompt.session, "other").await.unwrap();
    let next = whole.logits(&prompt.opening).await.unwrap();
    assert_eq!(session.logits(&prompt.opening).await.unwrap(), next);
    let mut stream = session.generate(reply(1)).await.unwrap();
    let ended = loop {
        match stream.next().await.unwrap() {
            Event::End(ended) => break ended,
            Event::Failed(error) => panic!("{error}"),
            Event::Text { .. } => {}
        }
    };
    assert_eq!(ended.prompt as usize, prompt.opening.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_are_named() {
    let engine = tiny(&Options::default());
    let mut session = engine.open(talk("Hello"), "").await.unwrap();
    let invalid = |error: Option<EngineError>| match error {
        Some(EngineError::Invalid(message)) => message,
        other => panic!("{other:?}"),
    };
    let hot = Generation {
        sampling: Sampling { temperature: -1.0, ..Sampling::default() },
        ..Generation::default()
    };
    let message = invalid(session.generate(hot).await.err());
    assert_eq!(message, "temperature must be from 0 to 100, got -1");
    let message = invalid(session.decide(&[yes_or_no("Is it?"), yes_or_no("")]).await.err());
    assert!(message.starts_with("question 1: "), "{message}");
    let mut plain = engine.open_text("Hello", "").await.unwrap();
    let message = invalid(plain.decide(&[yes_or_no("Is it?")]).await.err());
    assert!(message.contains("plain text"), "{message}");
    let message = invalid(engine.open_tokens(&[u32::MAX], "").await.err());
    assert!(message.contains("4294967295"), "{message}");
    let message = invalid(engine.open_text("", "").await.err());
    assert!(message.contains("at least one token"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_answers_whoever_waits() {
    let engine = tiny(&Options { chunk: 1, ..Options::default() });
    let session = engine.open(talk("Hello"), "").await.unwrap();
    let waiting = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.open(talk(&"Too late. ".repeat(100)), "").await })
    };
    let stream = session.generate(reply(10_000)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let stopper = engine.clone();
    tokio::task::spawn_blocking(move || stopper.stop()).await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(EngineError::Stopped)));
    assert!(matches!(stream.complete().await, Err(EngineError::Stopped) | Ok(_)));
    assert!(matches!(engine.open(talk("Hello"), "").await, Err(EngineError::Stopped)));
    assert!(!engine.is_running());
}
