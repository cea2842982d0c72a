//! The circuit's JSON: what is there, and what is wrong with it.

use forkpoint_policy::{Criteria, Outcome, Question, boolean, choice, score};
use serde_json::{Map, Value};

/// A circuit whose names are all resolved.
#[derive(Debug)]
pub(crate) struct Circuit {
    pub(crate) questions: Vec<(String, Question)>,
    pub(crate) gates: Vec<Node>,
    /// Of the gates: each after those that it hangs on.
    pub(crate) order: Vec<usize>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) unsure: Rule,
    pub(crate) otherwise: Rule,
}

#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) when: Node,
    pub(crate) then: Outcome,
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// What holds, does not hold, or cannot be told. AND is "at least all of", OR "at least one of".
#[derive(Debug, PartialEq)]
pub(crate) enum Node {
    /// The user's last turn holds this text, in lower case.
    Word(String),
    /// The answer to a question is at least so sure: of yes, or of an option.
    Probability(usize, String, f64),
    /// The answer to a score question lies at or above this level.
    Level(usize, f64),
    Gate(usize),
    Not(Box<Node>),
    AtLeast(usize, Vec<Node>),
}

type Parsed<T> = Result<T, String>;

/// Reads a circuit.
pub(crate) fn circuit(text: &str) -> Parsed<Circuit> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let top = object(&value, "the circuit", &["questions", "gates", "rules", "unsure", "otherwise"])?;
    let empty = Map::new();
    let table = |key: &str| {
        top.get(key).map_or(Ok(&empty), |value| value.as_object().ok_or(format!("{key}: expected an object")))
    };
    let (asked, gated) = (table("questions")?, table("gates")?);
    for name in asked.keys().chain(gated.keys()) {
        code("a name", name)?;
    }
    if let Some(name) = gated.keys().find(|name| asked.contains_key(*name)) {
        return Err(format!("{name:?} is a question and a gate"));
    }
    let mut questions = Vec::new();
    for (name, value) in asked {
        questions.push((name.clone(), question(value, &format!("questions.{name}"))?));
    }
    let names = Names { questions: &questions, gates: gated.keys().map(String::as_str).collect() };
    let gates = gated.iter().map(|(name, value)| names.node(value, &format!("gates.{name}")));
    let gates: Vec<Node> = gates.collect::<Parsed<_>>()?;
    let order = in_order(&gates, &names.gates)?;
    let listed = top.get("rules").and_then(Value::as_array).ok_or("rules: expected a list")?;
    let rules = listed.iter().enumerate().map(|(at, value)| names.rule(value, &format!("rules[{at}]"), true));
    let rules = rules.collect::<Parsed<_>>()?;
    let ending = |key: &str| {
        let value = top.get(key).ok_or(format!("{key}: an outcome is needed"))?;
        names.rule(value, key, false)
    };
    let (unsure, otherwise) = (ending("unsure")?, ending("otherwise")?);
    Ok(Circuit { questions, gates, order, rules, unsure, otherwise })
}

struct Names<'a> {
    questions: &'a [(String, Question)],
    gates: Vec<&'a str>,
}

impl Names<'_> {
    fn rule(&self, value: &Value, at: &str, conditional: bool) -> Parsed<Rule> {
        let known: &[&str] =
            if conditional { &["when", "then", "reason", "message"] } else { &["then", "reason", "message"] };
        let rule = object(value, at, known)?;
        let text =
            |key: &str| rule.get(key).and_then(Value::as_str).ok_or(format!("{at}.{key}: expected a text"));
        let reason = text("reason")?.to_owned();
        code(&format!("{at}.reason"), &reason)?;
        Ok(Rule {
            when: if conditional {
                self.node(
                    rule.get("when").ok_or(format!("{at}.when: expected a condition"))?,
                    &format!("{at}.when"),
                )?
            } else {
                Node::AtLeast(0, Vec::new())
            },
            then: text("then")?.parse().map_err(|what| format!("{at}.then: {what}"))?,
            reason,
            message: if rule.contains_key("message") { text("message")? } else { "Refused by a rule." }
                .to_owned(),
        })
    }

    fn node(&self, value: &Value, at: &str) -> Parsed<Node> {
        if let Some(name) = value.as_str() {
            if let Some(gate) = self.gates.iter().position(|gate| *gate == name) {
                return Ok(Node::Gate(gate));
            }
            let index = self.question(name, at)?;
            return match self.questions[index].1.criteria {
                Criteria::Boolean(_) => Ok(Node::Probability(index, "yes".into(), 0.5)),
                _ => Err(format!("{at}: {name:?} is not answered by yes or no; give it a \"from\"")),
            };
        }
        let node =
            object(value, at, &["word", "question", "is", "from", "all", "any", "not", "at-least", "of"])?;
        let keys: Vec<&str> = node.keys().map(String::as_str).collect();
        let list = |key: &str| -> Parsed<Vec<Node>> {
            let parts = node[key]
                .as_array()
                .filter(|parts| !parts.is_empty())
                .ok_or(format!("{at}.{key}: expected a list"))?;
            parts.iter().enumerate().map(|(n, part)| self.node(part, &format!("{at}.{key}[{n}]"))).collect()
        };
        // A map's keys come sorted.
        match keys[..] {
            ["word"] => match node["word"].as_str() {
                Some(word) if !word.is_empty() => Ok(Node::Word(word.to_lowercase())),
                _ => Err(format!("{at}.word: expected a text")),
            },
            ["all"] => list("all").map(|parts| Node::AtLeast(parts.len(), parts)),
            ["any"] => list("any").map(|parts| Node::AtLeast(1, parts)),
            ["not"] => Ok(Node::Not(Box::new(self.node(&node["not"], &format!("{at}.not"))?))),
            ["at-least", "of"] => {
                let parts = list("of")?;
                match node["at-least"].as_u64() {
                    Some(least) if (1..=parts.len() as u64).contains(&least) => {
                        Ok(Node::AtLeast(least as usize, parts))
                    }
                    _ => Err(format!("{at}.at-least: expected a number from 1 to {}", parts.len())),
                }
            }
            ["from", "question"] | ["from", "is", "question"] => self.threshold(node, at),
            _ => Err(format!("{at}: {} do not go together", keys.join(", "))),
        }
    }

    /// `{"question": "angry", "from": 0.8}`, with `is` for a choice; a score's `from` is a level.
    fn threshold(&self, node: &Map<String, Value>, at: &str) -> Parsed<Node> {
        let name = node["question"].as_str().ok_or(format!("{at}.question: expected a name"))?;
        let index = self.question(name, at)?;
        let (is, from) = (node.get("is").and_then(Value::as_str), node["from"].as_f64());
        let within = |most: f64| {
            from.filter(|from| (0.0..=most).contains(from))
                .ok_or(format!("{at}.from: expected a number from 0 to {most}"))
        };
        match (&self.questions[index].1.criteria, is) {
            (Criteria::Boolean(_), None) => Ok(Node::Probability(index, "yes".into(), within(1.0)?)),
            (Criteria::Score(levels), None) => Ok(Node::Level(index, within(levels.len() as f64 - 1.0)?)),
            (Criteria::Choice(options), Some(is)) if options.iter().any(|option| option.name == is) => {
                Ok(Node::Probability(index, is.to_owned(), within(1.0)?))
            }
            (Criteria::Choice(_), _) => Err(format!("{at}.is: expected one of the options of {name:?}")),
            _ => Err(format!("{at}.is: {name:?} is not a choice")),
        }
    }

    fn question(&self, name: &str, at: &str) -> Parsed<usize> {
        let found = self.questions.iter().position(|(known, _)| known == name);
        found.ok_or(format!("{at}: there is no question or gate named {name:?}"))
    }
}

/// `{"boolean": "Is it …?"}`, `{"choice": "Which …?", "options": […]}` or `{"score": "How …?", "levels": […]}`.
fn question(value: &Value, at: &str) -> Parsed<Question> {
    let asked = object(value, at, &["boolean", "choice", "options", "score", "levels", "probe"])?;
    let text = |key: &str| asked.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    let list = |key: &str, most: usize| -> Parsed<Vec<String>> {
        let parts = asked.get(key).and_then(Value::as_array).into_iter().flatten();
        let texts: Option<Vec<String>> = parts.map(|part| part.as_str().map(str::to_owned)).collect();
        texts
            .filter(|texts| (2..=most).contains(&texts.len()))
            .ok_or(format!("{at}.{key}: expected 2 to {most} texts"))
    };
    let made = match (text("boolean"), text("choice"), text("score")) {
        (Some(text), None, None) => boolean(text),
        (None, Some(text), None) => choice(text, list("options", 26)?),
        (None, None, Some(text)) => score(text, list("levels", 10)?),
        _ => return Err(format!("{at}: expected one of boolean, choice and score, with what is asked")),
    };
    Ok(match text("probe") {
        Some(probe) => made.probe(probe),
        None => made,
    })
}

/// An object that has no other keys than these.
fn object<'a>(value: &'a Value, at: &str, known: &[&str]) -> Parsed<&'a Map<String, Value>> {
    let object = value.as_object().ok_or(format!("{at}: expected an object"))?;
    match object.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(format!("{at}: there is no {key:?}; there are {}", known.join(", "))),
        None => Ok(object),
    }
}

/// The gates in an order in which each comes after those that it hangs on; gates that hang on themselves are refused.
fn in_order(gates: &[Node], names: &[&str]) -> Parsed<Vec<usize>> {
    fn visit(
        gate: usize,
        gates: &[Node],
        names: &[&str],
        path: &mut Vec<usize>,
        done: &mut Vec<usize>,
    ) -> Parsed<()> {
        if done.contains(&gate) {
            return Ok(());
        }
        let circle = path.contains(&gate);
        path.push(gate);
        if circle {
            let way: Vec<&str> = path.iter().map(|&gate| names[gate]).collect();
            return Err(format!("gates go round in a circle: {}", way.join(" > ")));
        }
        uses(&gates[gate]).into_iter().try_for_each(|next| visit(next, gates, names, path, done))?;
        path.pop();
        done.push(gate);
        Ok(())
    }
    let mut done = Vec::new();
    (0..gates.len()).try_for_each(|gate| visit(gate, gates, names, &mut Vec::new(), &mut done))?;
    Ok(done)
}

pub(crate) fn uses(node: &Node) -> Vec<usize> {
    match node {
        Node::Gate(gate) => vec![*gate],
        Node::Not(part) => uses(part),
        Node::AtLeast(_, parts) => parts.iter().flat_map(uses).collect(),
        Node::Word(_) | Node::Probability(..) | Node::Level(..) => Vec::new(),
    }
}

/// A name stands in a label, a reason in a header.
fn code(what: &str, text: &str) -> Parsed<()> {
    let fits = |c: u8| c.is_ascii_alphanumeric() || b"-_.:".contains(&c);
    if (1..=64).contains(&text.len()) && text.bytes().all(fits) {
        return Ok(());
    }
    Err(format!("{what} has 1 to 64 letters, digits or any of -_.: and not {:?}", short(text)))
}

/// A text that fits a label's value.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(questions: &str, gates: &str, rules: &str) -> String {
        let text = format!(
            r#"{{"questions": {{{questions}}}, "gates": {{{gates}}}, "rules": [{rules}],
                "unsure": {{"then": "next", "reason": "unsure"}}, "otherwise": {{"then": "generate", "reason": "plain"}}}}"#
        );
        circuit(&text).map(|circuit| format!("{circuit:?}")).unwrap_err()
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let q = r#""q": {"boolean": "Is it?"}, "c": {"choice": "Which?", "options": ["x", "y"]}, "s": {"score": "How?", "levels": ["low", "high"]}"#;
        for (gates, rules, expected) in [
            (r#""g": "h""#, "", r#"gates.g: there is no question or gate named "h""#),
            (
                r#""g": "h", "h": {"not": "i"}, "i": {"any": ["q", "g"]}"#,
                "",
                "gates go round in a circle: g > h > i > g",
            ),
            (r#""g": "g""#, "", "gates go round in a circle: g > g"),
            (r#""q": {"word": "a"}"#, "", r#""q" is a question and a gate"#),
            (r#""g": {"xor": ["q"]}"#, "", r#"gates.g: there is no "xor"; there are word, question"#),
            (r#""g": {"all": []}"#, "", "gates.g.all: expected a list"),
            (r#""g": {"word": "a", "not": "q"}"#, "", "gates.g: not, word do not go together"),
            (
                r#""g": {"at-least": 3, "of": ["q", "q"]}"#,
                "",
                "gates.g.at-least: expected a number from 1 to 2",
            ),
            (r#""g": {"question": "q", "from": 1.5}"#, "", "gates.g.from: expected a number from 0 to 1"),
            (
                r#""g": {"question": "c", "is": "z", "from": 0.5}"#,
                "",
                r#"gates.g.is: expected one of the options of "c""#,
            ),
            (r#""g": {"question": "s", "is": "low", "from": 0.5}"#, "", r#"gates.g.is: "s" is not a choice"#),
            (r#""g": "c""#, "", r#"gates.g: "c" is not answered by yes or no"#),
            (
                "",
                r#"{"when": "q", "then": "allow", "reason": "x"}"#,
                "rules[0].then: expected generate, next",
            ),
            (
                "",
                r#"{"when": "q", "then": "next", "reason": "two words"}"#,
                "rules[0].reason has 1 to 64 letters",
            ),
            ("", r#"{"then": "next", "reason": "x"}"#, "rules[0].when: expected a condition"),
        ] {
            let got = error(q, gates, rules);
            assert!(got.starts_with(expected), "{gates} {rules}\n got {got}\nwant {expected}");
        }
        assert!(
            error(r#""q": {"boolean": "a", "score": "b"}"#, "", "")
                .starts_with("questions.q: expected one of")
        );
        assert!(
            error(r#""q": {"choice": "a", "options": ["x"]}"#, "", "")
                .starts_with("questions.q.options: expected 2")
        );
        assert!(error(r#""q r": {"boolean": "a"}"#, "", "").starts_with("a name has 1 to 64 letters"));
        assert!(circuit("{").is_err() && circuit("[]").is_err() && circuit(r#"{"rules": []}"#).is_err());
    }

    #[test]
    fn a_bare_name_is_a_yes_from_one_half_on() {
        let read = circuit(
            r#"{"questions": {"q": {"boolean": "Is it?", "probe": "p"}}, "rules": [{"when": "q", "then": "next", "reason": "x"}],
               "unsure": {"then": "next", "reason": "u"}, "otherwise": {"then": "next", "reason": "o"}}"#,
        )
        .unwrap();
        assert_eq!(read.rules[0].when, Node::Probability(0, "yes".into(), 0.5));
        assert_eq!(read.questions[0].1.probe.as_deref(), Some("p"));
    }
}
