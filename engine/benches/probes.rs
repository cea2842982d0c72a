//! What probes cost: `cargo bench -p forkpoint-engine --bench probes [-- MODEL.gguf]`.
//!
//! Prints how long a probe's answer takes on a warm session, how long 200 short examples take to fit, what a fit does
//! to requests that come meanwhile, and what prefill pays for hidden states that are kept. SmolLM2 as
//! `forkpoint pull smollm2-135m` leaves it is the default.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint_engine::probe::{Examples, Probe, layer};
use forkpoint_engine::{Conversation, Criteria, Engine, Message, Options, Question, Role};

/// Warm answers that are timed.
const ANSWERS: usize = 500;
/// Examples of the fit, and words that one has at most.
const EXAMPLES: usize = 200;
const WORDS: usize = 25;
/// Requests timed with and without a fit beside them.
const REQUESTS: usize = 60;
/// Pairs of prefills.
const PAIRS: usize = 8;
/// Tokens of a prefill, more or less.
const PREFILL: usize = 1024;

fn main() {
    let named = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let model = named.map_or_else(default_model, PathBuf::from);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let engine = start(&model);
        let info = engine.model();
        say(&format!("{}, {}", info.name, info.device));
        let examples = examples();
        let started = Instant::now();
        let learned = engine.learn(examples.clone(), |_| {}).await.expect("the examples fit");
        let read = started.elapsed();
        let probe = Arc::new(learned.fit());
        say(&format!(
            "fit of {EXAMPLES} examples   {:.1} s: {:.1} s to read, {:.1} s to fit",
            started.elapsed().as_secs_f64(),
            read.as_secs_f64(),
            (started.elapsed() - read).as_secs_f64()
        ));
        let turn = |text: String| Message::new(Role::User, text);
        let short = "Which of these servers has to be restarted tonight, and in what order?";
        answers(&engine, &probe, vec![turn(short.into())]).await;
        let long = text(&engine, 4096, 1);
        let between = Message::new(Role::Assistant, "Noted.");
        answers(&engine, &probe, vec![turn(long.clone()), between, turn(short.into())]).await;
        answers(&engine, &probe, vec![turn(long)]).await;
        beside(&engine, &examples).await;
        drop(engine);
        prefills(&model).await;
    });
}

fn default_model() -> PathBuf {
    let cache = std::env::var_os("FORKPOINT_CACHE").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/forkpoint");
    cache.unwrap_or_else(home).join("models/smollm2-135m-instruct-q4_1.gguf")
}

fn start(model: &std::path::Path) -> Engine {
    Engine::start(model, &Options::default()).unwrap_or_else(|error| panic!("{}: {error}", model.display()))
}

fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn talk(text: &str) -> Conversation {
    Conversation { messages: vec![Message::new(Role::User, text)], tools: vec![] }
}

/// Short examples of tests/data, as many of either label.
fn examples() -> Examples {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/probes/shell.jsonl");
    let text = std::fs::read_to_string(path).expect("the tests' data");
    let short = |line: &&str| line.split_whitespace().count() <= WORDS + 6 && !line.contains("\"messages\"");
    let of = |label: &str| {
        let label = format!("\"label\": \"{label}\"");
        text.lines().filter(short).filter(|line| line.contains(&label)).take(EXAMPLES / 2).collect::<Vec<_>>()
    };
    let mut lines = [of("yes"), of("no")].concat();
    // As many as were asked for, whatever the file has.
    while lines.len() < EXAMPLES {
        lines.push(lines[lines.len() % 50]);
    }
    Examples::parse(&lines.join("\n")).expect("the tests' data")
}

fn question() -> Question {
    Question {
        instructions: "Does it need a shell?".into(),
        criteria: Criteria::Boolean { yes: None, no: None },
    }
}

/// A text of so many tokens, more or less, unlike that of another seed.
fn text(engine: &Engine, tokens: usize, seed: usize) -> String {
    let mut text = String::new();
    for word in 0.. {
        if word % 64 == 0 && engine.count_tokens(&text) >= tokens {
            break;
        }
        text += ["server ", "orders ", "night ", "light ", "river "][(word * 7 + seed * 3 + word / 5) % 5];
        text += &((word * 31 + seed) % 97).to_string();
        text.push(' ');
    }
    text
}

/// The share of times that are no longer.
fn at(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * share).round() as usize]
}

/// The last of the turns is what the probe reads.
async fn answers(engine: &Engine, probe: &Arc<Probe>, messages: Vec<Message>) {
    let span = engine.count_tokens(&messages[messages.len() - 1].content);
    let conversation = Conversation { messages, tools: vec![] };
    let held = engine.open(conversation.clone(), "").await.expect("room for it").usage().tokens;
    let mut times = Vec::with_capacity(ANSWERS);
    for _ in 0..ANSWERS {
        let mut session = engine.open(conversation.clone(), "").await.expect("room for it");
        let started = Instant::now();
        let answers = session.decide_by(&[question()], &[Some(probe.clone())]).await.expect("an answer");
        times.push(started.elapsed());
        assert_eq!((answers.len(), session.usage().decided), (1, 0));
    }
    let (median, worst) = (at(&mut times, 0.5), at(&mut times, 0.99));
    say(&format!(
        "answer on {held} warm tokens, {span} of them read   p50 {} us, p99 {} us, no token computed",
        median.as_micros(),
        worst.as_micros()
    ));
}

/// Requests one after the other, with and without a fit in the background.
async fn beside(engine: &Engine, examples: &Examples) {
    let alone = requests(engine, 0).await;
    let (engine_, examples) = (engine.clone(), examples.clone());
    let fit = tokio::spawn(async move {
        loop {
            let learned = engine_.learn(examples.clone(), |_| {}).await.expect("the examples fit");
            drop(learned);
        }
    });
    let together = requests(engine, 1).await;
    fit.abort();
    let _ = fit.await;
    let ratio =
        |share| at(&mut together.clone(), share).as_secs_f64() / at(&mut alone.clone(), share).as_secs_f64();
    say(&format!(
        "request of a prompt and two questions   p50 {:.0} ms, p95 {:.0} ms; beside a fit {:.2} and {:.2} times as long",
        at(&mut alone.clone(), 0.5).as_secs_f64() * 1e3,
        at(&mut alone.clone(), 0.95).as_secs_f64() * 1e3,
        ratio(0.5),
        ratio(0.95)
    ));
}

async fn requests(engine: &Engine, round: usize) -> Vec<Duration> {
    let mut times = Vec::with_capacity(REQUESTS);
    for request in 0..REQUESTS {
        let conversation = talk(&text(engine, 100, 1000 * (round + 1) + request));
        let started = Instant::now();
        let mut session = engine.open(conversation, "").await.expect("room for it");
        session.decide(&[question(), question()]).await.expect("an answer");
        times.push(started.elapsed());
    }
    times
}

async fn prefills(model: &std::path::Path) {
    let mut ratios = Vec::with_capacity(2 * PAIRS);
    // Which engine is there first moves its memory, and that moves the ratio.
    for first in [0, 1] {
        let engines = [start(model), start(model)];
        let [plain, keeping] =
            if first == 0 { [&engines[0], &engines[1]] } else { [&engines[1], &engines[0]] };
        keeping.keep_hidden(&[layer(keeping.model().layers)]).await.expect("room for it");
        pairs(plain, keeping, &mut ratios).await;
    }
    ratios.sort_by(f64::total_cmp);
    say(&format!(
        "prefill with hidden states kept   {:.3} times as long (median of {} pairs, {:.3} to {:.3})",
        ratios[PAIRS],
        2 * PAIRS,
        ratios[0],
        ratios[2 * PAIRS - 1]
    ));
}

async fn pairs(plain: &Engine, keeping: &Engine, ratios: &mut Vec<f64>) {
    for pair in 0..=PAIRS {
        let mut times = [0.0; 2];
        // Which of the two goes first alternates.
        for side in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            let engine = [plain, keeping][side];
            let conversation = talk(&text(engine, PREFILL, 77 + pair));
            let started = Instant::now();
            drop(engine.open(conversation, "").await.expect("room for it"));
            times[side] = started.elapsed().as_secs_f64();
        }
        // The first pair warms up.
        if pair > 0 {
            ratios.push(times[1] / times[0]);
        }
    }
}
