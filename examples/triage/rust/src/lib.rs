//! Support triage: which queue a conversation belongs to, whether that queue must act now, and how upset the customer
//! is. Three questions, each asked with the answer to the one before, then the reply; its limits are the request's.
//!
//! A chain suits questions that build on each other: the second is put in the words of the queue that the first chose,
//! the third in the words of the second's answer. Each costs its own few tokens, since the conversation stays warm. All
//! three reach the journal as labels; the reason is the queue, or `unsure` where the model took the first question for
//! no question at all.
//!
//! Configuration: `urgent-at`, the probability from which a conversation is urgent (default: 0.5).

use forkpoint_policy::*;

/// The queues: a name, what it takes, and what it must not leave for tomorrow.
const QUEUES: [(&str, &str, &str); 4] = [
    ("billing", "charges, invoices, refunds and contracts", "money is being taken by mistake"),
    ("delivery", "parcels that are late, lost or damaged", "a parcel can still be stopped or turned round"),
    ("technical", "faults, access and how to use the product", "the product cannot be used at all"),
    ("person", "threats, legal matters and whatever fits no other queue", "someone may come to harm"),
];

/// Below this mass the model did not take the question for one.
const UNSURE_BELOW: f64 = 0.02;

#[policy]
fn route(_request: &Request, session: &Session) -> Result<Routing> {
    let urgent_at = config_within("urgent-at", 0.5, 0.0..=1.0)?;
    let queue = session.ask(choice(
        "Which queue should take over this support conversation?",
        QUEUES.map(|(name, takes, _)| (name, takes)),
    ))?;
    let chosen = QUEUES.iter().find(|(name, _, _)| queue.is(name)).unwrap_or(&QUEUES[3]);
    let urgent = session.ask(
        boolean(format!("The conversation goes to the {} queue. Must it be dealt with today?", chosen.0))
            .sides(format!("yes, {}", chosen.2), "no, it can wait for its turn"),
    )?;
    let pressing = urgent.yes >= urgent_at;
    let mood = session.ask(score(
        if pressing {
            "The case is urgent. How upset is the customer about it?"
        } else {
            "The case can wait. How upset will the customer be about that?"
        },
        ["calm", "impatient", "angry"],
    ))?;
    let reason = if queue.mass < UNSURE_BELOW { "unsure" } else { chosen.0 };
    Ok(generate()
        .because(reason)
        .label("queue", chosen.0)
        .label("confidence", format!("{:.2}", queue.confidence))
        .label("urgent", format!("{:.2}", urgent.yes))
        .label("mood", format!("{:.2}", mood.level)))
}
