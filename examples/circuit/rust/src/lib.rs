//! Runs a circuit that the operator wrote: questions and words at its inputs, AND, OR, NOT and at-least-k gates with
//! thresholds in between, named outcomes at its end.
//!
//! Words are looked up for nothing, so rules that words alone decide cost no question; what the rest needs is asked in
//! one step. Rules are read in order and the first that holds wins. A question that the model took for none is neither
//! yes nor no, and so is a gate that hangs on it: a rule that cannot be told takes the outcome `unsure`, rather than the
//! next rule.
//!
//! Configuration: `circuit`, the circuit as JSON; docs/policies/circuit.md has the form and an example.

mod evaluate;
mod parse;

use evaluate::Found;
use forkpoint_policy::*;
use parse::Rule;

/// A plan may have 16 labels; one of them is ours.
const LABELS: usize = 15;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let text = config("circuit").ok_or("config circuit is not set")?;
    let circuit = parse::circuit(&text).map_err(|what| format!("config circuit: {what}"))?;
    let min_mass = config_within("min-mass", 0.02, 0.0..=1.0)?;
    let on_failure = config_or("on-failure", Outcome::Next)?;
    let said = request.last_user().to_lowercase();

    // With no answers yet: what words alone decide needs no question.
    let mut answers = vec![None; circuit.questions.len()];
    let first = match circuit.first(&answers, &said) {
        Found::Rule(at) => return Ok(plan(&circuit.rules[at])),
        Found::None => return Ok(plan(&circuit.otherwise)),
        Found::Unsure(at) => at,
    };
    let wanted = circuit.questions_from(first);
    let questions: Vec<Question> = wanted.iter().map(|&at| circuit.questions[at].1.clone()).collect();
    match session.decide_all(&questions) {
        Ok(got) => wanted.iter().zip(got).for_each(|(&at, answer)| answers[at] = Some(answer)),
        Err(error) => return Ok(on_failure.after(&error)),
    }
    let sure: Vec<Option<Answer>> =
        answers.iter().map(|answer| answer.clone().filter(|answer| answer.mass >= min_mass)).collect();
    let routing = plan(match circuit.first(&sure, &said) {
        Found::Rule(at) => &circuit.rules[at],
        Found::None => &circuit.otherwise,
        Found::Unsure(_) => &circuit.unsure,
    });
    let unsure = wanted.iter().filter(|&&at| sure[at].is_none()).count();
    let told = wanted.iter().filter_map(|&at| Some((&circuit.questions[at].0, answers[at].as_ref()?)));
    Ok(told.take(LABELS).fold(routing.label("unsure", unsure), |routing, (name, answer)| {
        if answer.yes.is_finite() {
            routing.figure(name, answer.yes)
        } else if answer.level.is_finite() {
            routing.figure(name, answer.level)
        } else {
            routing.label(name, parse::short(answer.top()))
        }
    }))
}

fn plan(rule: &Rule) -> Routing {
    rule.then.because(&rule.reason, &rule.message)
}
