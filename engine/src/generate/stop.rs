//! Stop strings: a reply ends before the first of them.

/// Lets text through until a stop string comes, holding back what could still
/// become one.
#[derive(Debug)]
pub(crate) struct StopScanner {
    stops: Vec<String>,
    held: String,
}

impl StopScanner {
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes more of the reply. Returns what is certain to belong to it, and
    /// whether a stop string came.
    pub(crate) fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.stops.iter().map(|stop| partial(&self.held, stop)).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, kept), false)
    }

    /// The reply is whole: what was held back belongs to it.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The longest end of `text`, in bytes, that `stop` starts with.
fn partial(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(at, _)| at).rev().find(|&at| text.ends_with(&stop[..at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut scanner = StopScanner::new(stops.iter().map(|&s| s.into()).collect());
        let mut out = Vec::new();
        for piece in pieces {
            let (text, stopped) = scanner.push(piece);
            out.push(text);
            if stopped {
                return (out, true);
            }
        }
        out.push(scanner.finish());
        (out, false)
    }

    #[test]
    fn a_stop_string_across_pieces_ends_the_reply_before_it() {
        assert_eq!(feed(&["END"], &["ab E", "N", "D cd"]), (vec!["ab ".into(), "".into(), "".into()], true));
    }

    #[test]
    fn what_only_looked_like_one_is_let_through() {
        let (pieces, stopped) = feed(&["END"], &["ab EN", "x", "y EN"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("ab ENxy EN", false));
        assert_eq!(pieces[0], "ab ");
    }

    #[test]
    fn the_first_of_several_counts() {
        assert_eq!(feed(&["yy", "x"], &["a x yy"]), (vec!["a ".into()], true));
    }

    #[test]
    fn characters_are_never_split() {
        let (pieces, stopped) = feed(&["é!"], &["caf", "é", "?"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("café?", false));
    }
}
