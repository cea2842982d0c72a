//! What a circuit says, with three values: a condition holds, does not, or cannot be told (`None`).

use crate::parse::{Circuit, Node};
use forkpoint_policy::Answer;

/// What the rules lead to.
#[derive(Debug, PartialEq)]
pub(crate) enum Found {
    /// The first rule that holds; those before it do not.
    Rule(usize),
    /// This rule cannot be told; those before it do not hold.
    Unsure(usize),
    /// No rule holds.
    None,
}

impl Circuit {
    /// The first rule that does not fail. An answer that is not there cannot be told; `said` is in lower case.
    pub(crate) fn first(&self, answers: &[Option<Answer>], said: &str) -> Found {
        let mut gates = vec![None; self.gates.len()];
        for &gate in &self.order {
            gates[gate] = holds(&self.gates[gate], &gates, answers, said);
        }
        for (at, rule) in self.rules.iter().enumerate() {
            match holds(&rule.when, &gates, answers, said) {
                Some(true) => return Found::Rule(at),
                Some(false) => {}
                None => return Found::Unsure(at),
            }
        }
        Found::None
    }

    /// The questions that this rule and the later ones hang on, in their order.
    pub(crate) fn questions_from(&self, first: usize) -> Vec<usize> {
        let mut wanted = vec![false; self.questions.len()];
        let mut gates = vec![false; self.gates.len()];
        self.rules[first..].iter().for_each(|rule| mark(&rule.when, &mut gates, &mut wanted));
        // A gate comes after those that it hangs on, so backwards each is seen before them.
        for &gate in self.order.iter().rev() {
            if gates[gate] {
                mark(&self.gates[gate], &mut gates, &mut wanted);
            }
        }
        (0..wanted.len()).filter(|&at| wanted[at]).collect()
    }
}

fn mark(node: &Node, gates: &mut [bool], questions: &mut [bool]) {
    match node {
        Node::Word(_) => {}
        Node::Probability(at, ..) | Node::Level(at, _) => questions[*at] = true,
        Node::Gate(gate) => gates[*gate] = true,
        Node::Not(part) => mark(part, gates, questions),
        Node::AtLeast(_, parts) => parts.iter().for_each(|part| mark(part, gates, questions)),
    }
}

fn holds(node: &Node, gates: &[Option<bool>], answers: &[Option<Answer>], said: &str) -> Option<bool> {
    match node {
        Node::Word(word) => Some(said.contains(word)),
        Node::Probability(at, name, from) => {
            answers[*at].as_ref().map(|answer| answer.probability(name) >= *from)
        }
        Node::Level(at, from) => answers[*at].as_ref().map(|answer| answer.level >= *from),
        Node::Gate(gate) => gates[*gate],
        Node::Not(part) => holds(part, gates, answers, said).map(|held| !held),
        Node::AtLeast(least, parts) => {
            let (mut held, mut open) = (0, 0);
            for part in parts {
                match holds(part, gates, answers, said) {
                    Some(true) => held += 1,
                    Some(false) => {}
                    None => open += 1,
                }
            }
            match (held >= *least, held + open >= *least) {
                (true, _) => Some(true),
                (false, true) => None,
                (false, false) => Some(false),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::circuit;

    /// A circuit over the words a, b, c and the question `q`, with one rule.
    fn one(when: &str, gates: &str) -> Circuit {
        let text = format!(
            r#"{{"questions": {{"q": {{"boolean": "Is it?"}}}}, "gates": {{{gates}}},
                "rules": [{{"when": {when}, "then": "reject 403", "reason": "held"}}],
                "unsure": {{"then": "next", "reason": "unsure"}}, "otherwise": {{"then": "generate", "reason": "plain"}}}}"#
        );
        circuit(&text).unwrap()
    }

    fn found(when: &str, gates: &str, said: &str) -> Found {
        one(when, gates).first(&[None], said)
    }

    #[test]
    fn gates_do_what_their_names_say() {
        let (a, b) = (r#"{"word": "a"}"#, r#"{"word": "b"}"#);
        let all = format!(r#"{{"all": [{a}, {b}]}}"#);
        assert_eq!(found(&all, "", "a b"), Found::Rule(0));
        assert_eq!(found(&all, "", "a"), Found::None);
        assert_eq!(found(&format!(r#"{{"any": [{a}, {b}]}}"#), "", "b"), Found::Rule(0));
        assert_eq!(found(&format!(r#"{{"not": {a}}}"#), "", "b"), Found::Rule(0));
        let two = format!(r#"{{"at-least": 2, "of": [{a}, {b}, {{"word": "c"}}]}}"#);
        assert_eq!(found(&two, "", "a c"), Found::Rule(0));
        assert_eq!(found(&two, "", "c"), Found::None);
    }

    #[test]
    fn what_cannot_be_told_spreads_only_as_far_as_it_matters() {
        assert_eq!(found(r#""q""#, "", "a"), Found::Unsure(0));
        assert_eq!(found(r#"{"not": "q"}"#, "", "a"), Found::Unsure(0));
        assert_eq!(found(r#"{"all": ["q", {"word": "b"}]}"#, "", "a"), Found::None, "the word fails already");
        assert_eq!(
            found(r#"{"any": ["q", {"word": "a"}]}"#, "", "a"),
            Found::Rule(0),
            "the word holds already"
        );
        assert_eq!(
            found(r#"{"at-least": 2, "of": ["q", {"word": "a"}, {"word": "b"}]}"#, "", "a"),
            Found::Unsure(0)
        );
    }

    #[test]
    fn gates_are_told_in_the_order_that_they_need() {
        let gates = r#""a1": {"not": "z9"}, "z9": {"word": "b"}"#;
        assert_eq!(found(r#""a1""#, gates, "a"), Found::Rule(0));
        assert_eq!(found(r#""a1""#, gates, "b"), Found::None);
    }

    #[test]
    fn only_the_questions_that_matter_are_asked() {
        assert_eq!(one(r#""g""#, r#""g": {"any": ["q", {"word": "a"}]}"#).questions_from(0), [0]);
        assert!(
            one(r#""g""#, r#""g": {"word": "a"}, "h": "q""#).questions_from(0).is_empty(),
            "h leads nowhere"
        );
    }
}
