//! Stops an agent that goes round in circles.
//!
//! Calls since the user spoke are counted in code: the same tool, the same arguments and the same result are one and
//! the same step, and from `nudge-at` of them on the model is told so, from `stop-at` on the request is refused, with
//! no question. A repeat that brought something new starts over. A call that waits for its result is left to the gates.
//! Where the calls differ and one tool is called again and again, one question asks whether they repeat what has failed;
//! a yes only ever earns the reminder.
//!
//! Configuration: docs/policies/loop-breaker.md.

mod calls;

use forkpoint_policy::*;

/// Below this mass the model did not take the question for one.
const UNSURE_BELOW: f64 = 0.02;

/// So many calls of one tool in a row look like a search that does not get on.
const ROW: usize = 3;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let nudge_at = config_within("nudge-at", 3, 2..)?;
    let stop_at = config_within("stop-at", 5, 2..)?;
    if nudge_at > stop_at {
        return Err(format!("config nudge-at = {nudge_at} lies above stop-at = {stop_at}").into());
    }
    let ask_from = config_within("ask-from", 6, ROW..)?;
    let stuck_at = config_within("stuck-at", 0.8, 0.0..=1.0)?;
    let exempt = config_list("exempt", "");
    let pass = config_or("pass", Outcome::Next)?;
    let stop = config_or("stop", Outcome::Reject(409))?;
    let on_failure = config_or("on-failure", pass.clone())?;

    // A reminder would end the chain before a gate behind this policy had judged what is to run.
    if !request.pending_calls().is_empty() {
        return Ok(pass.because("pending", ""));
    }
    let calls = calls::since_user(request);
    let Some(last) = calls.last() else {
        return Ok(pass.because("no-calls", ""));
    };
    if exempt.iter().any(|name| name == last.name) {
        return Ok(pass.because("exempt", "").label("tool", clip(last.name)));
    }
    let same = calls::repeats(&calls);
    let noted = |routing: Routing| {
        routing.label("tool", clip(last.name)).label("same", same).label("calls", calls.len())
    };
    if same >= stop_at {
        let message = format!("The same call was made {same} times with the same result; the loop is ended.");
        return Ok(noted(stop.because("loop", &message)));
    }
    if same >= nudge_at {
        return Ok(noted(nudge(&format!(
            "You have made the same call {same} times and got the same result. Do not make it again: try another way, \
             or say what is missing."
        ))
        .because("repeat")));
    }
    if calls.len() < ask_from || calls.iter().rev().take(ROW).any(|call| call.name != last.name) {
        return Ok(noted(pass.because("fresh", "")));
    }
    let asked = session.ask(
        boolean("Do the assistant's last tool calls repeat an approach that has failed already?")
            .sides("yes, they vary what did not work", "no, they make progress"),
    );
    let stuck = match asked {
        Ok(answer) => answer,
        Err(error) => return Ok(noted(on_failure.after(&error))),
    };
    let routing = if stuck.yes >= stuck_at && stuck.mass >= UNSURE_BELOW {
        let text = "Your last calls repeat an approach that has failed. Say what you have learnt, then try another way.";
        nudge(text).because("stuck")
    } else {
        pass.because("fresh", "")
    };
    Ok(noted(routing).figure("stuck", stuck.yes))
}

/// A reply here, after a reminder that stands where the conversation stays warm.
fn nudge(text: &str) -> Generate {
    generate().system(text)
}

/// A tool's name as a label's value, which is bounded.
fn clip(name: &str) -> String {
    name.chars().take(60).collect()
}
