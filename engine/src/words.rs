//! What a conversation, and what is added to it, says in tokens.

use std::ops::Range;

use crate::chat::{Conversation, Message, Role};
use crate::decide::{self, Question};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::shared::Shared;

/// Stands for a question while the turn around it is rendered.
const PLACEHOLDER: &str = "forkpoint-question-placeholder";

/// Stands for a turn's own text while its place is looked for: no turn begins or
/// ends like it.
const MARK: &str = "\u{F8FF}\u{F8FE}";

/// A conversation in tokens, with what a decision or a reply would compute
/// after it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// What [`Engine::open`] holds of the conversation.
    pub session: Vec<u32>,
    /// What each question adds, in the order asked.
    pub questions: Vec<Vec<u32>>,
    /// What a reply adds before its first token.
    pub opening: Vec<u32>,
}

impl Engine {
    /// The tokens of a conversation, of questions about it and of the opening
    /// of a reply to it. Computes nothing: for those who count tokens, or put
    /// the same ones to another server.
    ///
    /// # Errors
    /// As [`Engine::open`] and [`Session::decide`](crate::Session::decide);
    /// also where the chat template does not leave the conversation as it is
    /// when a turn follows, so that nothing is added to it.
    pub fn prompt(&self, conversation: &Conversation, questions: &[Question]) -> Result<Prompt, EngineError> {
        let shared = self.shared();
        let text = shared.template().render(&conversation.messages, &conversation.tools, false)?;
        let words = Words { shared, conversation, text: Some(&text) };
        let (suffixes, (opening, _)) = (words.suffixes(questions)?, words.delta(&[], true)?);
        if !suffixes.continues || !opening.continues {
            let what = "the model's chat template writes a conversation anew when a turn follows";
            return Err(EngineError::Invalid(what.into()));
        }
        let session = shared.encode(&text);
        Ok(Prompt { session, questions: suffixes.suffixes, opening: opening.tokens })
    }
}

/// A conversation and, where it is known, the text that its session holds.
pub(crate) struct Words<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) conversation: &'a Conversation,
    pub(crate) text: Option<&'a str>,
}

/// Tokens beyond those of a session.
pub(crate) struct Added {
    /// They follow the session; if not, they are the whole of a new text.
    pub(crate) continues: bool,
    pub(crate) tokens: Vec<u32>,
}

/// Tokens of questions, as in [`Added`].
pub(crate) struct Suffixes {
    pub(crate) continues: bool,
    pub(crate) suffixes: Vec<Vec<u32>>,
}

impl Words<'_> {
    /// The tokens of more turns, and of the reply's opening where `open`; then
    /// all that is said with them.
    pub(crate) fn delta(&self, turns: &[Message], open: bool) -> Result<(Added, String), EngineError> {
        let text = self.render(turns, open)?;
        let added = match self.added(&text) {
            Some(added) => Added { continues: true, tokens: self.shared.encode(added) },
            None => Added { continues: false, tokens: self.shared.encode(&text) },
        };
        Ok((added, text))
    }

    /// A question's turn is rendered once, and each question put in its place.
    pub(crate) fn suffixes(&self, questions: &[Question]) -> Result<Suffixes, EngineError> {
        let frame = self.render(&[Message::new(Role::User, PLACEHOLDER)], true)?;
        let (before, after) = frame.rsplit_once(PLACEHOLDER).ok_or_else(|| {
            EngineError::Invalid("the model's chat template leaves out what the last user says".into())
        })?;
        let (continues, before) = match self.added(before) {
            Some(added) => (true, added),
            None => (false, before),
        };
        let suffix = |(index, question): (usize, &Question)| {
            let text = decide::question_text(question).map_err(|error| match error {
                EngineError::Invalid(what) => EngineError::Invalid(format!("question {index}: {what}")),
                other => other,
            })?;
            Ok(self.shared.encode(&format!("{before}{text}{after}")))
        };
        let suffixes = questions.iter().enumerate().map(suffix).collect::<Result<_, EngineError>>()?;
        Ok(Suffixes { continues, suffixes })
    }

    /// The bytes, in the session's text, of what the last user turn says. None where
    /// there is no such turn, or the template leaves it out.
    pub(crate) fn last_user(&self) -> Result<Option<Range<usize>>, EngineError> {
        let Conversation { messages, tools } = self.conversation;
        let Some(last) = messages.iter().rposition(|message| message.role == Role::User) else {
            return Ok(None);
        };
        let mut turns = messages[..=last].to_vec();
        let template = self.shared.template();
        let rendered;
        let text = match self.text {
            Some(text) if last + 1 == messages.len() => text,
            _ => {
                rendered = template.render(&turns, tools, false)?;
                &rendered
            }
        };
        // What is the same with another text in its place is not the turn's own.
        MARK.clone_into(&mut turns[last].content);
        let other = template.render(&turns, tools, false)?;
        let before = text.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        let after = text.bytes().rev().zip(other.bytes().rev()).take_while(|(a, b)| a == b).count();
        let after = after.min(text.len() - before).min(other.len().saturating_sub(before));
        Ok(Some(before..text.len() - after).filter(|bytes| !bytes.is_empty()))
    }

    fn render(&self, turns: &[Message], open: bool) -> Result<String, EngineError> {
        let messages: Vec<Message> = self.conversation.messages.iter().chain(turns).cloned().collect();
        Ok(self.shared.template().render(&messages, &self.conversation.tools, open)?)
    }

    /// What a text says beyond the session's own, if it can be put into tokens
    /// by itself: a special token at its start keeps the two apart.
    fn added<'a>(&self, text: &'a str) -> Option<&'a str> {
        let added = text.strip_prefix(self.text?)?;
        (added.is_empty() || self.shared.starts_with_special(added)).then_some(added)
    }
}
