//! Where a conversation is answered, and what it takes to move it.

use std::fmt;

/// A decision about a conversation.
#[derive(Debug, PartialEq)]
pub(crate) struct Place {
    /// To the upstream; else it is answered here.
    pub(crate) moved: bool,
    /// How many user turns there were when it was decided.
    pub(crate) turns: usize,
}

impl Place {
    /// What the store holds, such as `local 3`; nothing for what it cannot be.
    pub(crate) fn read(value: &[u8]) -> Option<Self> {
        let (place, turns) = std::str::from_utf8(value).ok()?.split_once(' ')?;
        let moved = match place {
            "moved" => true,
            "local" => false,
            _ => return None,
        };
        Some(Self { moved, turns: turns.parse().ok()? })
    }

    /// Whether it is time to look again; an interval of 0 never is.
    pub(crate) fn due(&self, turns: usize, every: usize) -> bool {
        every > 0 && turns >= self.turns.saturating_add(every)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", if self.moved { "moved" } else { "local" }, self.turns)
    }
}

/// From which probability on moving pays: rises with the tokens that are warm here, and no further from `long` on.
pub(crate) fn bar(move_at: f64, sure_at: f64, tokens: u32, long: u32) -> f64 {
    move_at + (sure_at - move_at) * (f64::from(tokens) / f64::from(long)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_written() {
        let place = Place { moved: true, turns: 3 };
        assert_eq!(Place::read(place.to_string().as_bytes()), Some(place));
        for bad in [&b""[..], b"moved", b"away 3", b"local x", b"\xff 3"] {
            assert_eq!(Place::read(bad), None);
        }
    }

    #[test]
    fn a_review_is_due_after_so_many_turns() {
        let place = Place { moved: false, turns: 2 };
        assert!(!place.due(7, 6) && place.due(8, 6));
        assert!(!place.due(1000, 0), "0 is never");
    }

    #[test]
    fn the_bar_rises_with_the_session() {
        assert_eq!(bar(0.6, 0.9, 0, 1000), 0.6);
        assert!((bar(0.6, 0.9, 500, 1000) - 0.75).abs() < 1e-9);
        assert!((bar(0.6, 0.9, 9000, 1000) - 0.9).abs() < 1e-9);
    }
}
