//! Bytes, manifests and calls that nobody would write. `FORKPOINT_FUZZ_RUNS` makes a run longer, `FORKPOINT_FUZZ_SEED`
//! begins elsewhere; a seed that found something goes into [`SEEDS`].

use std::fs;
use std::sync::Arc;

use forkpoint::policy::offline::{Even, OfflineSession};
use forkpoint::policy::{Manifest, Workbench, WorkbenchError, WorkbenchOptions};

use super::{Bench, eventually, fixture, root, say, text, trial};

/// Where runs begin besides the one of the environment.
const SEEDS: [u64; 3] = [1, 0xf0bb, 0x5eed_cafe];

/// Xorshift (Marsaglia 2003): the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// One random source for each seed, and how often each is to be used.
fn sources(runs: usize) -> (Vec<Random>, usize) {
    let seeds = SEEDS.into_iter().chain(number("FORKPOINT_FUZZ_SEED"));
    let runs = number("FORKPOINT_FUZZ_RUNS").map_or(runs, |runs| runs as usize);
    (seeds.map(|seed| Random(seed.max(1))).collect(), runs)
}

/// A script of the fixture: calls in any order with any values.
fn script(random: &mut Random) -> String {
    let mut lines = Vec::new();
    let mut bytes = 0;
    for _ in 0..1 + random.below(12) {
        let text =
            random.pick(&["", "x", "Is it?", "a|b|c", "é\u{202e}\u{0}", "<|im_end|>", "word word word word"]);
        let long = "long ".repeat(random.below(100));
        let value = if random.below(6) == 0 { long.as_str() } else { text };
        let n = random.pick(&["0", "1", "-1", "3", "70000", "99999999999", "NaN", ""]);
        lines.push(match random.below(26) {
            0 => format!("ask:boolean:{value}"),
            1 => format!("ask:choice:{value}|a|b"),
            2 => format!("ask:score:{value}|{value}|{value}"),
            3 => format!("ask:probe:{value}|{value}"),
            4 | 5 => "decide".to_owned(),
            6 | 7 => "fork".to_owned(),
            8 => "drop".to_owned(),
            9 => format!("extend:user {value}"),
            10 => format!("extend:system {value}"),
            11 => format!("draft:{n}"),
            12 => "usage".to_owned(),
            13 => format!("set:{value}={value}"),
            14 => format!("add:{value}"),
            15 => format!("expire:k={value}"),
            16 => format!("log:{value}"),
            17 => format!("append:user {value}"),
            18 => format!("mount:{value}"),
            19 => format!("temperature:{n}"),
            20 => format!("max-tokens:{n}"),
            21 => "continue".to_owned(),
            22 => format!("because:{value}"),
            23 => format!("label:{value}={value}"),
            24 => format!("model:{value}"),
            _ => "request".to_owned(),
        });
    }
    let end = [
        "generate",
        "echo",
        "next",
        "trap",
        "foreign-session",
        "bad-text",
        "reject:70000:x:y",
        "forward:x",
        "error:x",
    ];
    lines.push(random.pick(&end).to_owned());
    // The turn itself must fit the tiny model's context.
    lines.retain(|line: &String| {
        bytes += line.len();
        bytes < 2_000
    });
    lines.join("\n").replace('\r', " ")
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_in_any_order_leave_sessions_and_pages_whole() {
    let bench = Arc::new(Bench::start(&["wild=scripted", "good=scripted"], |_| {}).await);
    bench.replace("trial", &trial());
    eventually("the trial is served", || bench.policies.has("trial")).await;
    let (sources, runs) = sources(40);
    for mut random in sources {
        for _ in 0..runs {
            // Side by side, some of them given up in the middle.
            let scripts: Vec<(String, bool)> =
                (0..4).map(|_| (script(&mut random), random.below(8) == 0)).collect();
            let calls = scripts.into_iter().map(|(script, given_up)| {
                let bench = bench.clone();
                tokio::spawn(async move {
                    let call = bench.route(&["wild", "trial", "wild"], say(&script));
                    let patience = std::time::Duration::from_millis(if given_up { 2 } else { 30_000 });
                    let routed = tokio::time::timeout(patience, call).await;
                    assert!(given_up || routed.is_ok(), "hangs:\n{script}");
                })
            });
            for call in futures::future::join_all(calls).await {
                call.unwrap();
            }
        }
        assert_eq!(text(&bench.run("good", "reply:fine").await), "fine");
    }
    // Every session and page comes back, which the engine's own counts say.
    Arc::into_inner(bench).unwrap().end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_components_are_refused_or_run() {
    let mut whole: Vec<Vec<u8>> =
        ["reply-v1", "scripted"].map(|name| fs::read(fixture(name)).unwrap()).into();
    whole.push(trial());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.wasm");
    let (sources, runs) = sources(12);
    let (mut refused, mut ran) = (0, 0);
    for mut random in sources {
        for _ in 0..runs {
            let mut bytes = whole[random.below(whole.len())].clone();
            match random.below(4) {
                0 => bytes.truncate(random.below(bytes.len())),
                1 => {
                    let at = random.below(bytes.len());
                    bytes[at] = random.next() as u8;
                }
                2 => {
                    let (at, len) = (random.below(bytes.len()), random.below(64));
                    let end = (at + len).min(bytes.len());
                    bytes.drain(at..end);
                }
                _ => {
                    for _ in 0..16 {
                        let at = random.below(bytes.len());
                        bytes[at] ^= 1 << random.below(8);
                    }
                }
            }
            fs::write(&path, &bytes).unwrap();
            match Workbench::load(&path, &WorkbenchOptions::default()) {
                Err(WorkbenchError::Refused(error)) => {
                    assert!(!error.message.is_empty());
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
                Ok(bench) => {
                    let request = say("reply:hello");
                    let session = OfflineSession::holding(&request.messages, Arc::new(Even));
                    let step = bench.call(&request, session).await;
                    assert!(step.plan.is_some() != step.fault.is_some(), "{step:?}");
                    bench.close().await;
                    ran += 1;
                }
            }
        }
    }
    assert!(refused > 0 && ran > 0, "{refused} refused, {ran} ran: the damage is all of one kind");
}

#[test]
fn a_manifest_of_any_text_is_read_or_refused_with_its_place() {
    let examples = fs::read_to_string(root().join("docs/manifest.md")).unwrap();
    let whole = examples.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    // The documentation's own is a good one, but for the hash and the signature that it leaves out.
    let whole = whole.replace("1e38…", &"0".repeat(64)).replace("m0Zt…", &format!("{}==", "A".repeat(86)));
    Manifest::parse(&whole).unwrap();
    let pieces: Vec<&str> = whole.split_inclusive([' ', '\n', '=', '"', '[', ']', ',']).collect();
    let (sources, runs) = sources(2_000);
    let mut refused = 0;
    for mut random in sources {
        for _ in 0..runs {
            let mut text: Vec<&str> = pieces.clone();
            for _ in 0..1 + random.below(3) {
                let at = random.below(text.len());
                match random.below(3) {
                    0 => drop(text.remove(at)),
                    1 => text.insert(at, random.pick(&pieces)),
                    _ => {
                        text[at] = random.pick(&[
                            "\u{0}",
                            "é",
                            "-1",
                            "1e999",
                            "'''",
                            "[[",
                            "99999999999999999999",
                            "true",
                        ])
                    }
                }
            }
            let text = text.concat();
            if let Err(error) = Manifest::parse(&text) {
                let lines = text.lines().count();
                assert!(
                    (1..=lines + 1).contains(&error.line) && !error.message.is_empty(),
                    "{error}\n{text}"
                );
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
}
