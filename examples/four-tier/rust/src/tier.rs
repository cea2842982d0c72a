//! Which tier the figures ask for.

use forkpoint_policy::{Request, Result, Role};

/// What was found out about a request.
pub(crate) struct Signals {
    /// From 0, trivial, to 3, expert.
    pub(crate) difficulty: f64,
    pub(crate) confidence: f64,
    /// From 0, nothing, to 2, safety or rights.
    pub(crate) stakes: f64,
    pub(crate) careful: bool,
    pub(crate) retries: usize,
}

/// What raises a tier, and to which.
pub(crate) struct Floors {
    /// From which difficulty on each upstream is taken.
    pub(crate) levels: [f64; 3],
    pub(crate) stakes_at: f64,
    pub(crate) stakes_tier: usize,
    pub(crate) careful_tier: usize,
    /// Below this confidence the tier goes up by one.
    pub(crate) sure_from: f64,
}

/// The tier, 0 to 3, and what set it: difficulty, or the floor that raised it last.
pub(crate) fn choose(signals: &Signals, floors: &Floors) -> (usize, &'static str) {
    let base = floors.levels.iter().filter(|level| signals.difficulty >= **level).count();
    let unsure = usize::from(signals.confidence < floors.sure_from);
    let stakes = if signals.stakes >= floors.stakes_at { floors.stakes_tier } else { 0 };
    let domain = if signals.careful { floors.careful_tier } else { 0 };
    let mut chosen = (base, "difficulty");
    let mut raise = |to: usize, reason| {
        if to.min(3) > chosen.0 {
            chosen = (to.min(3), reason);
        }
        chosen.0
    };
    let sure = raise(base + unsure, "unsure");
    raise(domain, "domain");
    raise(stakes, "stakes");
    // A retry says that what answered before was too weak, so it counts on top of the figures.
    raise(sure.max(domain).max(stakes).saturating_add(signals.retries), "retries");
    chosen
}

/// Three rising levels, with commas between.
pub(crate) fn levels(text: &str) -> Result<[f64; 3]> {
    let read: Option<Vec<f64>> = text.split(',').map(|level| level.trim().parse().ok()).collect();
    match read.as_deref() {
        Some(&[a, b, c]) if 0.0 <= a && a <= b && b <= c && c.is_finite() => Ok([a, b, c]),
        _ => {
            Err(format!("config tier-at = {text:?}: expected three rising levels with commas between").into())
        }
    }
}

/// How often the user said the same before.
pub(crate) fn repeats(request: &Request, text: &str) -> usize {
    let user = request.messages.iter().filter(|turn| turn.role == Role::User);
    user.filter(|turn| turn.content.trim() == text.trim()).count().saturating_sub(1)
}

/// Whether the text greets, thanks or takes leave and does nothing else. A bare "yes" may order much.
pub(crate) fn acknowledges(text: &str) -> bool {
    const WORDS: [&str; 8] =
        ["hi", "hello", "hey", "good morning", "thanks", "thank you", "many thanks", "bye"];
    let said = text.trim().trim_end_matches(['.', '!', ' ']).to_lowercase();
    WORDS.contains(&said.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOORS: Floors =
        Floors { levels: [0.75, 1.5, 2.25], stakes_at: 1.5, stakes_tier: 3, careful_tier: 2, sure_from: 0.5 };

    fn tier(
        difficulty: f64,
        confidence: f64,
        stakes: f64,
        careful: bool,
        retries: usize,
    ) -> (usize, &'static str) {
        choose(&Signals { difficulty, confidence, stakes, careful, retries }, &FLOORS)
    }

    #[test]
    fn difficulty_sets_the_tier_at_its_levels() {
        for (difficulty, expected) in
            [(0.0, 0), (0.74, 0), (0.75, 1), (1.49, 1), (1.5, 2), (2.25, 3), (3.0, 3)]
        {
            assert_eq!(tier(difficulty, 0.9, 0.0, false, 0), (expected, "difficulty"), "{difficulty}");
        }
    }

    #[test]
    fn floors_raise_and_never_lower() {
        assert_eq!(tier(0.0, 0.49, 0.0, false, 0), (1, "unsure"));
        assert_eq!(tier(0.0, 0.9, 0.0, true, 0), (2, "domain"));
        assert_eq!(tier(2.5, 0.9, 0.0, true, 0), (3, "difficulty"), "the floor lies below");
        assert_eq!(tier(0.0, 0.9, 1.5, true, 0), (3, "stakes"));
        assert_eq!(tier(0.0, 0.9, 0.0, false, 2), (2, "retries"));
        assert_eq!(tier(0.0, 0.9, 0.0, true, 1), (3, "retries"));
        assert_eq!(tier(3.0, 0.0, 2.0, true, usize::MAX), (3, "difficulty"), "there is no fifth");
    }

    #[test]
    fn levels_rise_or_are_refused() {
        assert_eq!(levels("0.5, 1,2").unwrap(), [0.5, 1.0, 2.0]);
        for bad in ["", "1,2", "2,1,3", "a,b,c", "NaN,1,2", "-1,0,1", "0,1,inf"] {
            assert!(levels(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_a_bare_acknowledgement_is_one() {
        assert!(acknowledges(" Thank you! ") && acknowledges("Bye."));
        assert!(!acknowledges("thanks, now prove it") && !acknowledges("yes") && !acknowledges(""));
    }
}
