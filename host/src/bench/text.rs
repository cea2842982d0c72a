//! What is put to the servers: transcripts of support cases and questions about them, new ones each time.
//!
//! Texts are drawn from a few lists by a seeded generator, so that they are of one kind in every run; a number of the
//! run's own at their head keeps any server from having seen them.

use std::time::{SystemTime, UNIX_EPOCH};

use forkpoint_engine::{ChoiceOption, Conversation, Criteria, Engine, EngineError, Message, Question, Role};

const WHO: [&str; 12] = [
    "A shop owner from Porto",
    "The night shift",
    "An accountant of the customer",
    "The courier's dispatcher",
    "A school's secretary",
    "The on-call engineer",
    "A returning customer",
    "The partner in Graz",
    "An apprentice at the counter",
    "The fraud desk",
    "A journalist",
    "The customer's neighbour",
];

const DID: [&str; 12] = [
    "asks again about",
    "sends a photograph of",
    "cannot find",
    "has paid twice for",
    "returns without a note",
    "wants a receipt for",
    "closes the case of",
    "disputes",
    "forwards a letter on",
    "has waited nine days for",
    "agrees to replace",
    "puts on hold",
];

const WHAT: [&str; 14] = [
    "the standing desk",
    "a yearly licence",
    "the second kettle",
    "an export of all contacts",
    "the broken hinge",
    "a pallet of tiles",
    "the login by text message",
    "a voucher from spring",
    "the invoice of last month",
    "an empty parcel",
    "the map in the app",
    "a spare battery",
    "the contract's last page",
    "a printer that hums",
];

const HOW: [&str; 8] = [
    "at {} past noon",
    "under case {}",
    "with {} euros still open",
    "after {} calls",
    "as note {} says",
    "in row {} of the sheet",
    "for the {}th time",
    "by order of desk {}",
];

/// Questions with four options, and what an option stands for where its name does not say it.
const ASKED: [(&str, [(&str, &str); 4]); 6] = [
    (
        "Which desk should take over",
        [
            ("accounts", "payments and invoices"),
            ("parcels", "what is sent or returned"),
            ("engineers", "what does not work"),
            ("lead", "threats and the law"),
        ],
    ),
    (
        "What should be done first about",
        [("answer", "all is known"), ("ask", "something is missing"), ("pay", "money is owed"), ("wait", "")],
    ),
    (
        "How soon does somebody have to look at",
        [("now", ""), ("today", ""), ("this week", ""), ("never", "")],
    ),
    (
        "Which tool does an assistant need for",
        [
            ("orders", "what was bought"),
            ("ledger", "moves money"),
            ("tracker", "follows a parcel"),
            ("none", "words are enough"),
        ],
    ),
    ("Who caused the trouble with", [("us", ""), ("carrier", ""), ("customer", ""), ("nobody", "")]),
    (
        "Which model should write the reply about",
        [
            ("small", "a sentence or two"),
            ("large", "facts to be weighed"),
            ("careful", "every word counts"),
            ("person", "no model should"),
        ],
    ),
];

/// A question as long as any: for estimates before there is an engine to ask.
pub(super) fn sample_question() -> String {
    let longest = ASKED.iter().map(|(asks, options)| {
        let options = options.iter().map(|(name, description)| format!("A: {name} - {description}\n"));
        format!("Question: {asks} {}, case 100?\n{}", WHAT[3], options.collect::<String>())
    });
    longest.max_by_key(String::len).unwrap_or_default()
}

/// A text and its tokens.
#[derive(Debug, Clone)]
pub(super) struct Text {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
}

/// A conversation of one user turn.
#[derive(Debug, Clone)]
pub(super) struct State {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
}

impl State {
    pub(super) fn conversation(&self) -> Conversation {
        Conversation { messages: vec![Message::new(Role::User, self.text.as_str())], tools: Vec::new() }
    }
}

/// A question about a state, and what asking it adds to the state's tokens.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) question: Question,
    pub(super) suffix: Vec<u32>,
}

/// Writes texts that no server has seen.
pub(super) struct Author {
    engine: Engine,
    state: u64,
    run: u64,
    written: u64,
    asked: usize,
}

impl Author {
    pub(super) fn new(engine: Engine) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { engine, state: 7, run: now.as_micros() as u64, written: 0, asked: 0 }
    }

    /// A text of `tokens` tokens, or a few less where no text has exactly so many.
    pub(super) fn text(&mut self, tokens: usize) -> Text {
        let text = self.transcript(tokens);
        let text = longest(&text, |part| self.engine.tokens(part).len() <= tokens);
        Text { tokens: self.engine.tokens(text), text: text.to_owned() }
    }

    /// A conversation of `tokens` tokens, or a few less.
    pub(super) fn state(&mut self, tokens: usize) -> Result<State, EngineError> {
        let frame = self.held("x")?.len().saturating_sub(self.engine.count_tokens("x"));
        let room = tokens.saturating_sub(frame).max(1);
        let text = self.transcript(room);
        let text = longest(&text, |part| self.engine.count_tokens(part) <= room).to_owned();
        Ok(State { tokens: self.held(&text)?, text })
    }

    /// So many questions about a state, none of which was asked before.
    pub(super) fn questions(&mut self, state: &State, count: usize) -> Result<Vec<Asked>, EngineError> {
        let questions: Vec<Question> = (0..count).map(|_| self.question()).collect();
        self.put(state, questions)
    }

    /// Questions with what asking them adds.
    pub(super) fn put(&self, state: &State, questions: Vec<Question>) -> Result<Vec<Asked>, EngineError> {
        let suffixes = self.engine.prompt(&state.conversation(), &questions)?.questions;
        Ok(questions.into_iter().zip(suffixes).map(|(question, suffix)| Asked { question, suffix }).collect())
    }

    /// What a reply to a state's conversation opens with.
    pub(super) fn opening(&self, state: &State) -> Result<Vec<u32>, EngineError> {
        Ok(self.engine.prompt(&state.conversation(), &[])?.opening)
    }

    fn held(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let messages = vec![Message::new(Role::User, text)];
        Ok(self.engine.prompt(&Conversation { messages, tools: Vec::new() }, &[])?.session)
    }

    /// Lines of a transcript with at least so many tokens.
    fn transcript(&mut self, tokens: usize) -> String {
        self.written += 1;
        let mut text = format!("{} in run {}: what was said, line by line.", self.written, self.run);
        let mut counted = 0;
        for line in 1u64.. {
            // Line by line they are as many as together, or nearly; the rest is in the surplus.
            if counted > tokens + 16 {
                break;
            }
            let how = self.pick(&HOW).replacen("{}", &self.below(9000).to_string(), 1);
            let said =
                format!("\n{line}. {} {} {}, {how}.", self.pick(&WHO), self.pick(&DID), self.pick(&WHAT));
            counted += self.engine.count_tokens(&said);
            text.push_str(&said);
        }
        text
    }

    fn question(&mut self) -> Question {
        let (asks, options) = ASKED[self.asked % ASKED.len()];
        self.asked += 1;
        // The number makes it another question even where the case comes again.
        let case = WHAT[self.asked / ASKED.len() % WHAT.len()];
        let instructions = format!("{asks} {case}, case {}?", 10 + self.asked);
        let option = |(name, description): (&str, &str)| ChoiceOption {
            name: name.to_owned(),
            description: Some(description.to_owned()).filter(|text| !text.is_empty()),
        };
        Question { instructions, criteria: Criteria::Choice(options.into_iter().map(option).collect()) }
    }

    fn pick<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len() as u64) as usize]
    }

    /// A number below `bound`: SplitMix64 (Steele, Lea and Flood 2014).
    fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// The longest beginning of a text that fits, by halving: longer beginnings have more tokens, but for the last few.
fn longest(text: &str, fits: impl Fn(&str) -> bool) -> &str {
    let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).chain([text.len()]).collect();
    let count = ends.partition_point(|&end| fits(&text[..end]));
    // Something has to be said.
    &text[..ends[count.saturating_sub(1)]]
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use forkpoint_engine::Options;

    use super::*;

    fn author() -> Author {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/qwen3-tiny");
        Author::new(Engine::start(&model, &Options { threads: 1, ..Options::default() }).unwrap())
    }

    #[test]
    fn texts_have_the_length_that_is_asked_for_and_are_new() {
        let mut author = author();
        let mut seen = HashSet::new();
        for tokens in [40, 200, 1500] {
            let text = author.text(tokens);
            assert!((tokens - 2..=tokens).contains(&text.tokens.len()), "{} of {tokens}", text.tokens.len());
            assert_eq!(author.engine.tokens(&text.text), text.tokens);
            assert!(seen.insert(text.tokens[..16].to_vec()), "its first page was seen before");
            let state = author.state(tokens + 100).unwrap();
            assert!((tokens + 98..=tokens + 100).contains(&state.tokens.len()), "{}", state.tokens.len());
        }
    }

    #[test]
    fn no_question_is_asked_twice() {
        let mut author = author();
        let state = author.state(100).unwrap();
        let asked = author.questions(&state, 500).unwrap();
        let texts: HashSet<_> = asked.iter().map(|asked| asked.question.instructions.clone()).collect();
        let suffixes: HashSet<_> = asked.iter().map(|asked| asked.suffix.clone()).collect();
        assert_eq!((texts.len(), suffixes.len()), (500, 500));
    }
}
