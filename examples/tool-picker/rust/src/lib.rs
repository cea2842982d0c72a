//! Mounts only those of the request's tools that the last request can need.
//!
//! Free rules first: a tool on the operator's list, one that the conversation has called before and one that the user
//! names are kept, and a few tools are not worth a question. Of each other tool one question asks whether it could be
//! needed, all in one step. A tool is dropped on a confident no and on nothing else: what is unsure stays, and where
//! most answers are unsure all of them stay.
//!
//! Configuration: docs/policies/tool-picker.md.

mod rules;

use forkpoint_policy::*;

/// Below this mass the model did not take the question for one.
const UNSURE_BELOW: f64 = 0.02;

/// A description is cut here, in bytes: a question costs its tokens, and the first sentence says what a tool is for.
const DESCRIPTION: usize = 160;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let keep = config_list("keep", "");
    let few = config_or("few", 3)?;
    let most = config_within("ask-most", 24, 1..=64)?;
    let drop_below = config_within("drop-below", 0.2, 0.0..=0.5)?;
    let on_failure = config_or("on-failure", Outcome::Generate)?;

    let offered = request.tools.len();
    if offered <= few {
        return Ok(generate().because("few-tools").label("offered", offered));
    }
    let settled = |tool: &Tool| {
        keep.contains(&tool.name)
            || rules::called(request, &tool.name)
            || rules::names(request.last_user(), &tool.name)
    };
    // What lies beyond the bound is kept unasked.
    let asked: Vec<&Tool> = request.tools.iter().filter(|tool| !settled(tool)).take(most).collect();
    if asked.is_empty() {
        return Ok(generate().because("all-kept").label("offered", offered));
    }
    let questions: Vec<Question> = asked.iter().map(|tool| question(tool)).collect();
    let answers = match session.decide_all(&questions) {
        Ok(answers) => answers,
        Err(error) => return Ok(on_failure.after(&error).label("offered", offered)),
    };
    let unsure = |answer: &&Answer| {
        answer.mass < UNSURE_BELOW || (answer.yes > drop_below && answer.yes < 1.0 - drop_below)
    };
    let doubts = answers.iter().filter(unsure).count();
    let needless = |tool: &Tool| {
        asked.iter().zip(&answers).any(|(known, answer)| {
            known.name == tool.name && answer.yes <= drop_below && answer.mass >= UNSURE_BELOW
        })
    };
    let mounted: Vec<&str> =
        request.tools.iter().filter(|tool| !needless(tool)).map(|tool| tool.name.as_str()).collect();
    let kept = mounted.len();
    let routing = if doubts * 2 > answers.len() {
        generate().because("unsure")
    } else if kept == offered {
        generate().because("all-needed")
    } else if kept == 0 {
        generate().without_tools().because("none-needed")
    } else {
        generate().mount(mounted).because("picked")
    };
    let lowest = answers.iter().map(|answer| answer.yes).fold(1.0, f64::min);
    Ok(routing
        .label("offered", offered)
        .label("asked", answers.len())
        .label("needless", offered - kept)
        .label("doubts", doubts)
        .figure("lowest", lowest))
}

fn question(tool: &Tool) -> Question {
    let about = rules::opening(tool.description.as_deref().unwrap_or(""), DESCRIPTION);
    let about = if about.is_empty() { String::new() } else { format!(" ({about})") };
    boolean(format!("Could the tool `{}`{about} be needed to answer the last request?", tool.name))
}
