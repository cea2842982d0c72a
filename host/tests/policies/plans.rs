//! Plans that come out of policies, and what policies see and keep on the way.

use forkpoint::policy::{CHAIN_EXHAUSTED, Plan, PlanRecord, PolicyOptions, PolicyRules};
use forkpoint_engine::{Message, Role, Rung, Tool};
use serde_json::json;

use super::{Bench, generated, say, text, untouched, with};

fn names(options: &mut PolicyOptions) {
    options.upstreams = ["strong".to_owned()].into();
    options.models = ["tiny".to_owned()].into();
    options.tools = ["search".to_owned()].into();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_plan_comes_out_as_the_policy_made_it() {
    let bench = Bench::start(&["scripted"], names).await;
    let run = async |script: &str| bench.run("scripted", script).await;

    assert_eq!(text(&run("reply:Good day.").await), "Good day.");
    let Plan::Reject { status, code, message, retry_after: None } =
        run("reject:451:not-here:Not here.").await.plan
    else {
        panic!("no rejection")
    };
    assert_eq!((status, code.as_str(), message.as_str()), (451, "not-here", "Not here."));
    let Plan::Forward { upstream, model } = run("model:large\nforward:strong").await.plan else {
        panic!("no forward")
    };
    assert_eq!((upstream.as_str(), model.as_deref()), ("strong", Some("large")));

    let routed = run("append:system Be brief.\nmount:search\ntemperature:0.5\nmax-tokens:7\nmodel:tiny\n\
                      because:short\nlabel:a=b\ngenerate")
    .await;
    let plan = generated(&routed);
    assert_eq!(plan.append, [Message::new(Role::System, "Be brief.")]);
    assert_eq!(plan.tools.as_deref(), Some(&["search".to_owned()][..]));
    assert_eq!((plan.sampling.temperature, plan.sampling.max_tokens), (Some(0.5), Some(7)));
    assert_eq!(plan.model.as_deref(), Some("tiny"));
    assert!(plan.session.is_none(), "the request's own session");
    assert_eq!(routed.reason, "short");
    assert_eq!(routed.labels, [("a".to_owned(), "b".to_owned())]);
    drop(routed);

    let status = bench.status("scripted");
    assert_eq!((status.calls, status.plans["generate"], status.plans["reject"]), (4, 1, 1));
    assert!(status.faults.values().all(|&count| count == 0), "{:?}", status.faults);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_are_answered_and_traced() {
    let bench = Bench::start(&["scripted"], names).await;
    let script = "ask:boolean:Is it?\nask:choice:Which?|red|green|blue\nask:score:How much?|low|high\ndecide\n\
                  decide:probe:Is it?|risk\necho";
    let routed = bench.run("scripted", script).await;
    let notes = text(&routed);
    let lines: Vec<&str> = notes.lines().collect();
    assert!(lines[0].contains("boolean ") && lines[0].contains("; choice ") && lines[0].contains("; score "));
    // Probes are switched off here: label reads answer, and do not claim to be one.
    assert!(lines[1].starts_with("boolean ") && !lines[1].contains("probe"), "{}", lines[1]);

    let step = &routed.trace.steps[0];
    assert_eq!((step.plan.as_ref().map(PlanRecord::kind), step.reason.as_str()), (Some("reply"), "echo"));
    let [decision, probed] = &step.decisions[..] else { panic!("{:?}", step.decisions) };
    assert_eq!(probed.answers[0].rung, Rung::Labels);
    assert_eq!((decision.questions.len(), decision.answers.len()), (3, 3));
    assert!((decision.answers[1].probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    assert_eq!((step.used.decisions, step.used.forks), (4, 0));
    assert!(step.used.decided_tokens > 0 && step.used.cpu_us > 0 && step.used.host_us > 0, "{:?}", step.used);
    assert!(step.used.memory >= 1 << 16 && step.used.wall_us >= step.used.host_us, "{:?}", step.used);
    assert_eq!(u64::from(routed.session.usage().unwrap().decided), step.used.decided_tokens);
    let json = serde_json::to_value(&routed.trace).unwrap();
    assert_eq!(json["steps"][0]["decisions"][0]["questions"][0]["instructions"], "Is it?");
    drop(routed);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_requests_session_stays_as_it_is_whatever_a_policy_does() {
    let bench = Bench::start(&["scripted"], names).await;
    // Appended to and drafted in: the plan continues from a fork that holds it.
    let routed = bench.run("scripted", "extend:system Be brief.\ndraft:3\ngenerate").await;
    let changed = generated(&routed).session.as_ref().expect("the changed session");
    assert_eq!(changed.conversation().messages.len(), 3);
    assert_eq!(changed.conversation().messages[1].content, "Be brief.");
    let session = routed.session.session().unwrap();
    assert_eq!(session.conversation().messages.len(), 1);
    assert_eq!(session.usage().reused + session.usage().computed, session.usage().tokens);
    assert!(routed.trace.used().generated_tokens <= 3);
    drop(routed);

    // A fork of the policy's own.
    let routed = bench.run("scripted", "fork\nextend:user And then?\ncontinue\ngenerate").await;
    let fork = generated(&routed).session.as_ref().expect("the fork");
    assert_eq!(fork.conversation().messages[1].content, "And then?");
    assert!(fork.usage().tokens > routed.session.usage().unwrap().tokens);
    drop(routed);

    // Forks that nobody kept, changes before a fault, changes before `next`.
    for script in ["fork\nfork\ndrop\ngenerate", "extend:system x\nfork\ntrap", "extend:system x\nnext"] {
        let routed = bench.run("scripted", script).await;
        assert!(generated(&routed).session.is_none(), "{script}");
        assert!(untouched(&routed), "{script}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn budgets_answer_the_policy_and_do_not_end_it() {
    let rules = "[limits]\ndecisions = 3\nforks = 1\ngenerated_tokens = 4\ndecided_tokens = 300";
    let bench = Bench::start(&["scripted"], with(toml::from_str(rules).unwrap())).await;
    let ask = "ask:boolean:Is it?\nask:boolean:Is it not?\ndecide\n";
    let notes = bench.notes("scripted", &ask.repeat(2)).await;
    let lines: Vec<&str> = notes.lines().collect();
    assert!(lines[0].starts_with("boolean") && lines[1].starts_with("failure budget"), "{notes}");
    assert!(lines[1].contains("2 of 3 questions"), "{notes}");

    let notes = bench.notes("scripted", "fork\nfork").await;
    assert!(notes.starts_with("failure budget") && notes.contains("1 forks"), "{notes}");

    let notes = bench.notes("scripted", "draft:100\ndraft:100\ndraft:100\ndraft:100\ndraft:100").await;
    let drafted =
        notes.lines().filter_map(|line| line.strip_prefix("draft ")?.split(' ').next()?.parse::<u64>().ok());
    assert!(drafted.sum::<u64>() <= 4 && notes.contains("failure budget"), "{notes}");

    // Said to be too much before it is computed.
    let long = "word ".repeat(520);
    for step in ["extend:user", "decide:boolean:"] {
        let notes = bench.notes("scripted", &format!("{step} {long}")).await;
        assert!(notes.contains("failure budget") && notes.contains("0 of 300 tokens"), "{notes}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_sees_what_it_is_granted_and_keeps_what_it_stored() {
    let rules = "config = { threshold = 0.8 }\ngrant = { headers = ['X-Tenant'] }";
    let rules: PolicyRules = toml::from_str(rules).unwrap();
    let bench = Bench::start(&["scripted", "other=scripted"], with(rules)).await;
    let mut request =
        say("config:threshold\nconfig:nothing\nheader:x-tenant\nheader:authorization\nrequest\necho");
    request.headers = vec![("x-tenant".into(), "acme".into()), ("authorization".into(), "secret".into())];
    request.tools = vec![Tool { name: "bash".into(), description: None, parameters: json!({}) }];
    request.sampling.max_tokens = Some(9);
    let mut proposal = Message::new(Role::Assistant, "");
    proposal.tool_calls = Some(json!([{ "id": "c1", "type": "function",
        "function": { "name": "bash", "arguments": "{\"cmd\":\"ls\"}" } }]));
    let chain = ["scripted".to_owned()];
    let session = bench
        .engine
        .open(forkpoint_engine::Conversation { messages: request.messages.clone(), tools: vec![] }, "")
        .await
        .unwrap();
    request.messages.insert(0, proposal);
    let notes = text(&bench.policies.route(&chain, request, session).await);
    for part in [
        "config Some(\"0.8\")\nconfig None\nheader Some(\"acme\")\nheader None\n",
        "model=auto",
        "tools=",
        "bash",
        "Some(9)",
    ] {
        assert!(notes.contains(part), "{part} in {notes}");
    }
    assert!(!notes.contains("secret"), "{notes}");

    assert_eq!(
        bench.notes("scripted", "get:a\nset:a=1\nget:a\nadd:n\nadd:n").await,
        "get None\nset\nget Some(\"1\")\nadd 1\nadd 2"
    );
    assert_eq!(
        bench.notes("scripted", "get:a\nadd:n").await,
        "get Some(\"1\")\nadd 3",
        "kept for the next call"
    );
    assert_eq!(bench.notes("other", "get:a").await, "get None", "another policy's store");
    // The same component with another hash: a custom section at its end changes nothing else.
    let mut bytes = std::fs::read(bench.path("scripted")).unwrap();
    bytes.extend([0, 2, 1, b'x']);
    let before = bench.status("scripted").hash;
    bench.replace("scripted", &bytes);
    super::eventually("it is reloaded", || bench.status("scripted").hash != before).await;
    assert_eq!(bench.notes("scripted", "get:a\nadd:n").await, "get Some(\"1\")\nadd 4", "kept over a reload");
    assert_eq!(bench.status("scripted").loads, 2);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_is_asked_in_order_until_someone_has_a_plan() {
    let bench = Bench::start(&["first=scripted", "v1=reply-v1"], names).await;
    let chain = async |chain: &[&str], script: &str| bench.route(chain, say(script)).await;
    {
        let routed = chain(&["first", "v1"], "next").await;
        assert_eq!((text(&routed).as_str(), routed.policy.as_str()), ("v1", "v1"));
        let asked: Vec<_> = routed
            .trace
            .steps
            .iter()
            .map(|step| (step.policy.as_str(), step.plan.as_ref().map(PlanRecord::kind)))
            .collect();
        assert_eq!(asked, [("first", Some("next")), ("v1", Some("reply"))]);

        let routed = chain(&["first", "v1"], "reply:mine").await;
        assert_eq!((text(&routed).as_str(), routed.trace.steps.len()), ("mine", 1));

        for (list, policy) in [(&["first", "first"][..], "first"), (&[], "")] {
            let routed = chain(list, "next").await;
            assert!(generated(&routed).session.is_none());
            assert_eq!((routed.reason.as_str(), routed.policy.as_str()), (CHAIN_EXHAUSTED, policy));
        }
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_asks_nothing_costs_next_to_nothing() {
    let bench = Bench::start(&["scripted"], names).await;
    let mut times = Vec::new();
    for _ in 0..500 {
        let used = bench.run("scripted", "reply:hi").await.trace.used();
        times.push((used.wall_us, used.cpu_us));
    }
    times.sort_unstable();
    let (median, slow) = (times[250], times[495]);
    eprintln!("wall and guest's processor time in microseconds: median {median:?}, p99 {slow:?}");
    assert!(median.0 < 5_000, "{median:?} us");
    bench.end().await;
}
