//! A sequence of tokens whose keys and values lie in pages: what a session is
//! to the engine's thread.

use std::rc::Rc;

use forkpoint_kernels::{PAGE_TOKENS, PageId, Slot};

use super::pages::{Chain, Page, Pages, chain};

/// Tokens to copy into a new tail before it is used.
#[derive(Debug)]
pub(crate) struct PageCopy {
    /// Held until the copy is done.
    pub(crate) from: Page,
    pub(crate) to: PageId,
    pub(crate) tokens: usize,
}

/// How many pages were missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) pages: usize,
}

/// What a sequence is computed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Purpose {
    /// A request: served as soon as the schedule allows.
    #[default]
    Request,
    /// The server's own study, of a probe's examples: served after every request,
    /// and no page of it is kept.
    Study,
    /// As a study, and nothing but hidden states are read: what lies above them is
    /// not computed.
    Features,
}

/// Tokens and their pages. Every page but the last is full and sealed.
#[derive(Debug)]
pub(crate) struct Sequence {
    store: Pages,
    tokens: Vec<u32>,
    pages: Vec<Page>,
    /// The chain before each full page, then the one after the last of them.
    chains: Vec<Chain>,
    /// Final-norm hidden state of the last token, where it was computed here.
    tip: Option<Rc<[f32]>>,
    purpose: Purpose,
    /// Which set of hidden states its pages keep; 0 for none.
    hidden: u32,
}

impl Sequence {
    /// An empty sequence of a model and tenant.
    pub(crate) fn new(store: &Pages, root: Chain, purpose: Purpose, hidden: u32) -> Self {
        Self {
            store: store.clone(),
            tokens: Vec::new(),
            pages: Vec::new(),
            chains: vec![root],
            tip: None,
            purpose,
            hidden,
        }
    }

    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }

    pub(crate) fn hidden(&self) -> u32 {
        self.hidden
    }

    fn alloc(&self) -> Option<Page> {
        self.store.alloc(self.purpose != Purpose::Request)
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn tip(&self) -> Option<&Rc<[f32]>> {
        self.tip.as_ref()
    }

    pub(crate) fn set_tip(&mut self, tip: Rc<[f32]>) {
        self.tip = Some(tip);
    }

    /// Ids of all pages, in order.
    pub(crate) fn page_ids(&self) -> impl Iterator<Item = PageId> + '_ {
        self.pages.iter().map(Page::id)
    }

    fn chain(&self) -> Chain {
        self.chains[self.chains.len() - 1]
    }

    /// The tokens of the page that the first of `pending` would fill.
    fn next_page(&self, pending: &[u32]) -> Option<[u32; PAGE_TOKENS]> {
        let tail = &self.tokens[self.tokens.len() / PAGE_TOKENS * PAGE_TOKENS..];
        let more = pending.get(..PAGE_TOKENS - tail.len())?;
        Some(std::array::from_fn(|i| if i < tail.len() { tail[i] } else { more[i - tail.len()] }))
    }

    /// The chain that the next full page would get: two sequences with the
    /// same one are about to compute the same page.
    pub(crate) fn next_chain(&self, pending: &[u32]) -> Option<Chain> {
        self.next_page(pending).map(|tokens| chain(self.chain(), &tokens))
    }

    /// Takes resident pages that hold the first of `pending`, whole pages
    /// only; a tail gives way to one. Returns how many tokens were found.
    pub(crate) fn reuse(&mut self, pending: &[u32]) -> usize {
        let before = self.len();
        while let Some(tokens) = self.next_page(&pending[self.len() - before..]) {
            let Some(page) = self.store.find(self.chain(), &tokens) else { break };
            self.tokens.truncate(self.len() / PAGE_TOKENS * PAGE_TOKENS);
            self.pages.truncate(self.len() / PAGE_TOKENS);
            self.pages.push(page);
            self.push_full(&tokens);
        }
        self.len() - before
    }

    /// After [`Sequence::reuse`]: copies the beginning of a page that starts
    /// like `pending`. Returns the copy to make and how many tokens it brings.
    pub(crate) fn reuse_beginning(&mut self, pending: &[u32]) -> Option<PageCopy> {
        if !self.len().is_multiple_of(PAGE_TOKENS) || pending.is_empty() {
            return None;
        }
        let within = &pending[..pending.len().min(PAGE_TOKENS)];
        let (from, tokens) = self.store.find_beginning(self.chain(), within)?;
        if tokens == PAGE_TOKENS {
            // A whole page is shared rather than copied.
            self.pages.push(from);
            self.push_full(within);
            return None;
        }
        let tail = self.alloc()?;
        let to = tail.id();
        self.pages.push(tail);
        self.tokens.extend_from_slice(&within[..tokens]);
        self.tip = None;
        Some(PageCopy { from, to, tokens })
    }

    /// Pages that `more` tokens need beyond those held.
    pub(crate) fn pages_for(&self, more: usize) -> usize {
        (self.len() + more).div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len())
    }

    /// Makes room for `more` tokens, all of it or none.
    pub(crate) fn reserve(&mut self, more: usize) -> Result<(), Shortage> {
        let pages = self.pages_for(more);
        if pages > self.store.available() {
            return Err(Shortage { pages });
        }
        for _ in 0..pages {
            self.pages.push(self.alloc().ok_or(Shortage { pages })?);
        }
        Ok(())
    }

    /// Where the next `count` tokens go; room was reserved.
    pub(crate) fn slots(&self, count: usize) -> impl Iterator<Item = Slot> + '_ {
        (self.len()..self.len() + count).map(|position| Slot {
            page: self.pages[position / PAGE_TOKENS].id(),
            offset: (position % PAGE_TOKENS) as u32,
        })
    }

    /// Takes in tokens whose keys and values were written to their slots, and
    /// seals the pages that they fill.
    pub(crate) fn commit(&mut self, tokens: &[u32]) {
        self.tip = None;
        for &token in tokens {
            self.tokens.push(token);
            if self.len().is_multiple_of(PAGE_TOKENS) {
                let index = self.len() / PAGE_TOKENS - 1;
                let full: [u32; PAGE_TOKENS] = std::array::from_fn(|i| self.tokens[index * PAGE_TOKENS + i]);
                let tail = self.pages.remove(index);
                let sealed = self.store.seal(tail, self.chain(), &full);
                self.pages.insert(index, sealed);
                self.chains.push(chain(self.chain(), &full));
            }
        }
    }

    /// A child that holds the first `at` tokens. Shares every full page and
    /// copies what lies beyond them.
    pub(crate) fn fork(&self, at: usize) -> Result<(Self, Option<PageCopy>), Shortage> {
        assert!(at <= self.len(), "cannot fork at {at} of {} tokens", self.len());
        let full = at / PAGE_TOKENS;
        let rest = at % PAGE_TOKENS;
        let mut child = Self {
            store: self.store.clone(),
            tokens: self.tokens[..at].to_vec(),
            pages: self.pages[..full].iter().map(Page::share).collect(),
            chains: self.chains[..=full].to_vec(),
            tip: if at == self.len() { self.tip.clone() } else { None },
            purpose: self.purpose,
            hidden: self.hidden,
        };
        if rest == 0 {
            return Ok((child, None));
        }
        let tail = self.alloc().ok_or(Shortage { pages: 1 })?;
        let copy = PageCopy { from: self.hold(full), to: tail.id(), tokens: rest };
        child.pages.push(tail);
        Ok((child, Some(copy)))
    }

    /// Ends the sequence, leaving its unfilled page findable.
    pub(crate) fn retire(mut self) {
        let rest = self.len() % PAGE_TOKENS;
        self.pages.truncate(self.len().div_ceil(PAGE_TOKENS));
        if rest > 0
            && let Some(tail) = self.pages.pop()
        {
            let tokens = &self.tokens[self.len() - rest..];
            drop(self.store.seal(tail, self.chain(), tokens));
        }
        // The last page is least useful alone: it must become the oldest.
        while self.pages.pop().is_some() {}
    }

    fn push_full(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.chains.push(chain(self.chain(), tokens));
        self.tip = None;
    }

    /// Gives up every token, and with them the pages.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.chains.truncate(1);
        self.tip = None;
        // As in `retire`.
        while self.pages.pop().is_some() {}
    }

    /// A handle that keeps a page, tail or sealed, while it is copied.
    fn hold(&self, index: usize) -> Page {
        self.pages[index].share()
    }
}
