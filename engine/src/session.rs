//! A session, as its holder sees it: a conversation whose keys and values are
//! resident.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::chat::{Conversation, Message, Role, tools_turn};
use crate::decide::{self, Answer, Question};
use crate::error::EngineError;
use crate::features::Span;
use crate::generate::{Completion, Event, Generation, Sampling};
use crate::schedule::{Base, Found, Suffix, Wanted, Write};
use crate::shared::{Resident, Shared};
use crate::words::Words;

/// Where a session's tokens came from, and what was computed on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens that the session holds.
    pub tokens: u32,
    /// Of those, tokens whose keys and values were resident already.
    pub reused: u32,
    /// Of those, tokens that were computed for it.
    pub computed: u32,
    /// Questions answered on it.
    pub decisions: u32,
    /// Suffix tokens computed to answer them; the session does not hold them.
    pub decided: u32,
}

/// A session. Dropping it gives its pages back to the cache.
#[derive(Debug)]
pub struct Session {
    resident: Resident,
    conversation: Conversation,
    /// What its tokens say; none where only the engine knows.
    text: Option<String>,
    /// Opened from a plain text: there are no turns to add to.
    plain: bool,
    usage: Usage,
    /// What was last read of its hidden states, as it stands: probes of a policy mostly
    /// read the same.
    features: Option<Box<Features>>,
}

/// The mean of a layer's hidden states over a span.
#[derive(Debug, Clone)]
struct Features {
    span: Span,
    layer: usize,
    mean: Arc<[f32]>,
}

/// Tokens and what they continue.
struct Delta {
    base: Base,
    tokens: Vec<u32>,
    /// What the session says once it holds them.
    text: String,
}

impl Session {
    pub(crate) fn new(
        resident: Resident,
        conversation: Conversation,
        text: String,
        plain: bool,
        usage: Usage,
    ) -> Self {
        Self { resident, conversation, text: Some(text), plain, usage, features: None }
    }

    /// What it holds.
    #[must_use]
    pub fn conversation(&self) -> &Conversation {
        &self.conversation
    }

    /// Where its tokens came from.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// A child that continues from here; computes nothing. Its usage counts
    /// its parent's tokens as reused.
    ///
    /// # Errors
    /// [`EngineError::Full`] when no page is left for its tail.
    pub async fn fork(&self) -> Result<Session, EngineError> {
        let resident = self.shared().resident();
        let grown = resident.grow(Base::Tip(self.resident.id()), Vec::new()).await?;
        let tokens = grown.tokens as u32;
        Ok(Self {
            resident,
            conversation: self.conversation.clone(),
            text: self.text.clone(),
            plain: self.plain,
            usage: Usage { tokens, reused: tokens, ..Usage::default() },
            features: self.features.clone(),
        })
    }

    /// Adds turns. Returns how many tokens the session now holds.
    ///
    /// # Errors
    /// When the turns do not fit the template, the context or the cache.
    pub async fn append(&mut self, messages: &[Message]) -> Result<u32, EngineError> {
        self.chat_only("append")?;
        let delta = self.delta(messages, false)?;
        let resident = self.shared().resident();
        let grown = resident.grow(delta.base, delta.tokens).await?;
        self.conversation.messages.extend_from_slice(messages);
        self.text = Some(delta.text);
        self.adopt(resident, grown.tokens, grown.computed);
        Ok(self.usage.tokens)
    }

    /// Answers the questions, in order, each independently of the others, over
    /// forks of this session; the session itself does not change (its usage
    /// counts them).
    ///
    /// # Errors
    /// [`EngineError::Invalid`] names the question and what is wrong with it.
    pub async fn decide(&mut self, questions: &[Question]) -> Result<Vec<Answer>, EngineError> {
        self.chat_only("decide")?;
        if questions.is_empty() {
            return Ok(Vec::new());
        }
        let (base, suffixes) = self.suffixes(questions)?;
        let readings = self.shared().read(base, suffixes).await?;
        self.usage.decisions += questions.len() as u32;
        self.usage.decided += readings.computed as u32;
        let answers = questions.iter().zip(readings.found).filter_map(|(question, found)| match found {
            Found::Labels(reading) => Some(decide::answer(&question.criteria, reading)),
            Found::Logits(_) => None,
        });
        Ok(answers.collect())
    }

    /// The logits, over the vocabulary, of the token that would follow
    /// `tokens` on a fork of this session: for evaluation.
    ///
    /// # Errors
    /// When the tokens do not fit the vocabulary, the context or the cache.
    pub async fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.shared().check_tokens(tokens)?;
        let suffix = Suffix { tokens: tokens.to_vec(), wanted: Wanted::Logits };
        let mut readings = self.shared().read(Base::Tip(self.resident.id()), vec![suffix]).await?;
        match readings.found.pop() {
            Some(Found::Logits(logits)) => Ok(logits),
            _ => Err(EngineError::Stopped),
        }
    }

    /// Starts a reply on a fork of this session.
    ///
    /// # Errors
    /// When the generation is invalid or does not fit; what goes wrong later
    /// arrives as [`Event::Failed`].
    pub async fn generate(&self, generation: Generation) -> Result<Stream, EngineError> {
        let Generation { append, tools, sampling } = generation;
        sampling.validate()?;
        let mut turns = append;
        turns.extend(tools_turn(&tools));
        let delta = if self.plain {
            if !turns.is_empty() {
                self.chat_only("append")?;
            }
            let base = Base::Tip(self.resident.id());
            Delta { base, tokens: Vec::new(), text: self.text.clone().unwrap_or_default() }
        } else {
            self.delta(&turns, true)?
        };
        self.start(delta, sampling).await
    }

    /// Writes a reply that the session then holds as an assistant turn.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub async fn draft(&mut self, sampling: Sampling) -> Result<Completion, EngineError> {
        self.chat_only("draft")?;
        sampling.validate()?;
        let delta = self.delta(&[], true)?;
        let opened = delta.text.clone();
        let mut stream = self.start(delta, sampling).await?;
        let mut text = String::new();
        let ended = loop {
            match stream.next().await {
                Some(Event::Text { text: more, .. }) => text += &more,
                Some(Event::End(ended)) => break ended,
                Some(Event::Failed(error)) => return Err(error),
                None => return Err(EngineError::Stopped),
            }
        };
        // Where text and tokens say different things, the next call finds out
        // how far they agree.
        self.text = ended.spelled.then(|| opened + &text);
        self.conversation.messages.push(Message::new(Role::Assistant, text.as_str()));
        let computed = ended.resident.saturating_sub(self.usage.tokens) as usize;
        self.adopt(stream.resident, ended.resident as usize, computed);
        Ok(Completion { text, tokens: ended.generated, reason: ended.reason })
    }

    /// [`Session::features`] of one layer, read once for calls that follow one another.
    pub(crate) async fn kept_features(
        &mut self,
        span: Span,
        layer: usize,
    ) -> Result<Arc<[f32]>, EngineError> {
        if let Some(known) = self.features.as_ref().filter(|known| (known.span, known.layer) == (span, layer))
        {
            return Ok(Arc::clone(&known.mean));
        }
        let read = self.features(span, &[layer]).await?.pop().ok_or(EngineError::NoHidden)?;
        let mean: Arc<[f32]> = read.into();
        self.features = Some(Box::new(Features { span, layer, mean: Arc::clone(&mean) }));
        Ok(mean)
    }

    /// A question was answered without the engine's thread.
    pub(crate) fn count_decision(&mut self) {
        self.usage.decisions += 1;
    }

    pub(crate) fn resident(&self) -> &Resident {
        &self.resident
    }

    /// The bytes of what the last user turn says.
    pub(crate) fn last_user(&self) -> Result<std::ops::Range<usize>, EngineError> {
        self.chat_only("a span of the last user turn")?;
        self.words()
            .last_user()?
            .ok_or_else(|| EngineError::Invalid("the session has no user turn with a text of its own".into()))
    }

    fn shared(&self) -> &Arc<Shared> {
        self.resident.shared()
    }

    fn adopt(&mut self, resident: Resident, tokens: usize, computed: usize) {
        self.resident = resident;
        self.features = None;
        self.usage.tokens = tokens as u32;
        self.usage.computed += computed as u32;
    }

    fn chat_only(&self, what: &str) -> Result<(), EngineError> {
        if self.plain {
            return Err(EngineError::Invalid(format!(
                "{what} needs a conversation, this session is a plain text"
            )));
        }
        Ok(())
    }

    async fn start(&self, delta: Delta, sampling: Sampling) -> Result<Stream, EngineError> {
        let (events, receiver) = mpsc::unbounded_channel();
        let resident = self.shared().resident();
        let write = Write {
            limit: sampling.max_tokens.map_or(usize::MAX, |limit| limit as usize),
            eos: if sampling.ignore_eos { Arc::default() } else { self.shared().eos() },
            sampling,
            events,
        };
        resident.write(delta.base, delta.tokens, write).await?;
        Ok(Stream { resident, receiver })
    }

    /// The tokens of more turns, and of the reply's opening where `open`.
    fn delta(&self, turns: &[Message], open: bool) -> Result<Delta, EngineError> {
        let (added, text) = self.words().delta(turns, open)?;
        Ok(Delta { base: self.base(added.continues), tokens: added.tokens, text })
    }

    fn suffixes(&self, questions: &[Question]) -> Result<(Base, Vec<Suffix>), EngineError> {
        let labels = self.shared().labels()?;
        let added = self.words().suffixes(questions)?;
        let wanted = questions.iter().map(|question| Wanted::Labels(labels.of(&question.criteria)));
        let suffixes = added.suffixes.into_iter().zip(wanted);
        let suffixes = suffixes.map(|(tokens, wanted)| Suffix { tokens, wanted }).collect();
        Ok((self.base(added.continues), suffixes))
    }

    fn base(&self, continues: bool) -> Base {
        let id = self.resident.id();
        if continues { Base::Tip(id) } else { Base::Beginning(id) }
    }

    fn words(&self) -> Words<'_> {
        Words { shared: self.shared(), conversation: &self.conversation, text: self.text.as_deref() }
    }
}

/// A reply as it is written. Dropping it ends the generation.
#[derive(Debug)]
pub struct Stream {
    resident: Resident,
    receiver: mpsc::UnboundedReceiver<Event>,
}

impl Stream {
    /// The next event; `None` after [`Event::End`] or [`Event::Failed`].
    pub async fn next(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// The reply's whole text, for those who do not stream.
    ///
    /// # Errors
    /// What broke the reply off.
    pub async fn complete(mut self) -> Result<Completion, EngineError> {
        let mut text = String::new();
        loop {
            match self.next().await {
                Some(Event::Text { text: more, .. }) => text += &more,
                Some(Event::End(ended)) => {
                    return Ok(Completion { text, tokens: ended.generated, reason: ended.reason });
                }
                Some(Event::Failed(error)) => return Err(error),
                None => return Err(EngineError::Stopped),
            }
        }
    }
}
