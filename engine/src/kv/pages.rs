//! The ledger of pages: which are free, held, or kept for reuse.
//!
//! A page is a private, writable *tail* or *sealed*: immutable, shared and
//! findable by the 128-bit hash of its tokens chained to its parent's.
//!
//! ```text
//!   free ──alloc──▶ tail ──seal──▶ sealed ──last handle drops──▶ cached
//!    ▲               │                ▲                            │
//!    └──────drop─────┘                └──────────find──────────────┤
//!    └──────────────────────evict (least recently used)────────────┘
//! ```

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use forkpoint_kernels::{PAGE_TOKENS, PageId};
use xxhash_rust::xxh3::xxh3_128;

/// The name of a run of tokens from a session's start.
pub(crate) type Chain = u128;

/// The chain that a session of this model and tenant starts from.
pub(crate) fn root(fingerprint: u128, salt: &str) -> Chain {
    let mut bytes = fingerprint.to_le_bytes().to_vec();
    bytes.extend_from_slice(salt.as_bytes());
    xxh3_128(&bytes)
}

/// The root of sessions that share no page with those of `root`, for what `word` says.
pub(crate) fn branch(root: Chain, word: &str) -> Chain {
    let mut bytes = root.to_le_bytes().to_vec();
    bytes.extend_from_slice(word.as_bytes());
    xxh3_128(&bytes)
}

/// The chain after `tokens`, at most a page of them.
pub(crate) fn chain(parent: Chain, tokens: &[u32]) -> Chain {
    debug_assert!(tokens.len() <= PAGE_TOKENS, "a page holds {PAGE_TOKENS} tokens, got {}", tokens.len());
    let mut bytes = [0; 16 + 4 * PAGE_TOKENS];
    bytes[..16].copy_from_slice(&parent.to_le_bytes());
    for (slot, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
        slot.copy_from_slice(&token.to_le_bytes());
    }
    xxh3_128(&bytes[..16 + 4 * tokens.len()])
}

/// What a sealed page holds: enough to verify a hit rather than trust a hash.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Contents {
    parent: Chain,
    /// 16 tokens, or fewer when a session ended inside the page.
    tokens: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Free,
    Tail,
    Sealed(Contents),
}

#[derive(Debug)]
struct Entry {
    state: State,
    /// Handles that hold the page.
    holders: u32,
    /// When the last holder left; the key in `cached`.
    left: u64,
    /// Freed rather than cached when the last holder leaves.
    fleeting: bool,
}

#[derive(Debug)]
struct Ledger {
    entries: Vec<Entry>,
    free: Vec<PageId>,
    /// Sealed pages without a holder, longest unused first.
    cached: BTreeMap<u64, PageId>,
    /// Sealed pages by the chain up to and with them.
    index: HashMap<Chain, PageId>,
    /// Sealed pages by the chain before them, to find one that begins alike.
    children: HashMap<Chain, Vec<PageId>>,
    clock: u64,
    evictions: u64,
}

impl Ledger {
    fn take(&mut self) -> Option<PageId> {
        if let Some(id) = self.free.pop() {
            return Some(id);
        }
        let (_, id) = self.cached.pop_first()?;
        self.evictions += 1;
        self.forget(id);
        Some(id)
    }

    /// Removes a sealed page from the index.
    fn forget(&mut self, id: PageId) {
        let entry = &mut self.entries[id as usize];
        let State::Sealed(contents) = std::mem::replace(&mut entry.state, State::Free) else {
            unreachable!("only sealed pages are indexed")
        };
        self.index.remove(&chain(contents.parent, &contents.tokens));
        if let Some(siblings) = self.children.get_mut(&contents.parent) {
            siblings.retain(|&sibling| sibling != id);
            if siblings.is_empty() {
                self.children.remove(&contents.parent);
            }
        }
    }

    fn hold(&mut self, id: PageId) {
        let entry = &mut self.entries[id as usize];
        if entry.holders == 0 {
            self.cached.remove(&entry.left);
        }
        entry.holders += 1;
    }

    fn leave(&mut self, id: PageId) {
        let entry = &mut self.entries[id as usize];
        entry.holders -= 1;
        if entry.holders > 0 {
            return;
        }
        let sealed = matches!(entry.state, State::Sealed(_));
        if sealed && entry.fleeting {
            self.forget(id);
            self.free.push(id);
        } else if sealed {
            self.clock += 1;
            entry.left = self.clock;
            self.cached.insert(self.clock, id);
        } else {
            entry.state = State::Free;
            self.free.push(id);
        }
    }

    fn contents(&self, id: PageId) -> Option<&Contents> {
        match &self.entries[id as usize].state {
            State::Sealed(contents) => Some(contents),
            State::Free | State::Tail => None,
        }
    }
}

/// All pages of an arena. Clones share one ledger, on one thread.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    ledger: Rc<RefCell<Ledger>>,
}

/// How many pages are in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Census {
    pub(crate) free: usize,
    pub(crate) held: usize,
    pub(crate) cached: usize,
    pub(crate) evictions: u64,
}

impl Pages {
    /// `total` free pages.
    pub(crate) fn new(total: usize) -> Self {
        let entries =
            (0..total).map(|_| Entry { state: State::Free, holders: 0, left: 0, fleeting: false }).collect();
        Self {
            ledger: Rc::new(RefCell::new(Ledger {
                entries,
                free: (0..total as PageId).rev().collect(),
                cached: BTreeMap::new(),
                index: HashMap::new(),
                children: HashMap::new(),
                clock: 0,
                evictions: 0,
            })),
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.ledger.borrow().entries.len()
    }

    pub(crate) fn census(&self) -> Census {
        let ledger = self.ledger.borrow();
        let (free, cached) = (ledger.free.len(), ledger.cached.len());
        Census { free, cached, held: ledger.entries.len() - free - cached, evictions: ledger.evictions }
    }

    /// Pages that can be had now: free, or cached and so evictable.
    pub(crate) fn available(&self) -> usize {
        let ledger = self.ledger.borrow();
        ledger.free.len() + ledger.cached.len()
    }

    /// A private page to write to, or none when live sessions hold them all. A
    /// `fleeting` one is not kept for reuse.
    pub(crate) fn alloc(&self, fleeting: bool) -> Option<Page> {
        let mut ledger = self.ledger.borrow_mut();
        let id = ledger.take()?;
        let entry = &mut ledger.entries[id as usize];
        debug_assert_eq!((entry.holders, &entry.state), (0, &State::Free));
        entry.holders = 1;
        entry.state = State::Tail;
        entry.fleeting = fleeting;
        Some(Page { id, ledger: Rc::clone(&self.ledger) })
    }

    /// Makes a tail immutable and findable. When an equal page is there
    /// already (two sessions computed it at once), that one is returned: equal
    /// tokens have equal bits.
    pub(crate) fn seal(&self, tail: Page, parent: Chain, tokens: &[u32]) -> Page {
        if let Some(twin) = self.find(parent, tokens) {
            return twin;
        }
        let mut ledger = self.ledger.borrow_mut();
        let key = chain(parent, tokens);
        // A colliding chain with other contents keeps its place; this page is
        // then held by its session alone and freed with it.
        if let std::collections::hash_map::Entry::Vacant(place) = ledger.index.entry(key) {
            place.insert(tail.id);
            ledger.children.entry(parent).or_default().push(tail.id);
            ledger.entries[tail.id as usize].state =
                State::Sealed(Contents { parent, tokens: tokens.to_vec() });
        }
        drop(ledger);
        tail
    }

    /// The sealed page that holds exactly these tokens after `parent`.
    pub(crate) fn find(&self, parent: Chain, tokens: &[u32]) -> Option<Page> {
        let mut ledger = self.ledger.borrow_mut();
        let id = *ledger.index.get(&chain(parent, tokens))?;
        let contents = ledger.contents(id)?;
        if contents.parent != parent || contents.tokens != tokens {
            return None;
        }
        ledger.hold(id);
        Some(Page { id, ledger: Rc::clone(&self.ledger) })
    }

    /// Among the sealed pages after `parent`, the one that begins like
    /// `tokens` for longest, and for how long; at least one token.
    pub(crate) fn find_beginning(&self, parent: Chain, tokens: &[u32]) -> Option<(Page, usize)> {
        let mut ledger = self.ledger.borrow_mut();
        let common = |id: &PageId| {
            ledger
                .contents(*id)
                .map_or(0, |contents| contents.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count())
        };
        let (length, id) = ledger.children.get(&parent)?.iter().map(|id| (common(id), *id)).max()?;
        if length == 0 {
            return None;
        }
        ledger.hold(id);
        Some((Page { id, ledger: Rc::clone(&self.ledger) }, length))
    }

    /// Panics unless every page is in exactly one place. For tests and debug
    /// builds: it walks the whole ledger.
    pub(crate) fn check(&self) {
        let ledger = self.ledger.borrow();
        let mut free = ledger.free.clone();
        free.sort_unstable();
        free.dedup();
        assert_eq!(free.len(), ledger.free.len(), "a page is free twice");
        let mut held = 0;
        for (id, entry) in (0 as PageId..).zip(&ledger.entries) {
            let is_free = free.binary_search(&id).is_ok();
            let is_cached = entry.holders == 0 && ledger.cached.get(&entry.left) == Some(&id);
            match &entry.state {
                State::Free => assert!(is_free && entry.holders == 0, "free page {id} is not in the list"),
                State::Tail => {
                    assert!(!is_free && entry.holders == 1, "tail {id} has {} holders", entry.holders)
                }
                State::Sealed(contents) => {
                    assert!(!is_free, "sealed page {id} is free");
                    assert_eq!(entry.holders == 0, is_cached, "page {id} without holder is not cached");
                    let key = chain(contents.parent, &contents.tokens);
                    assert_eq!(ledger.index.get(&key), Some(&id), "sealed page {id} is not indexed");
                    assert!(
                        ledger.children[&contents.parent].contains(&id),
                        "sealed page {id} has no parent"
                    );
                }
            }
            held += usize::from(entry.holders > 0);
        }
        assert_eq!(held + free.len() + ledger.cached.len(), ledger.entries.len(), "pages were lost");
        let children: usize = ledger.children.values().map(Vec::len).sum();
        assert_eq!(children, ledger.index.len(), "the index and the children disagree");
    }
}

/// A handle on a page. The last one to drop gives the page back.
#[derive(Debug)]
pub(crate) struct Page {
    id: PageId,
    ledger: Rc<RefCell<Ledger>>,
}

impl Page {
    pub(crate) fn id(&self) -> PageId {
        self.id
    }

    /// Another handle on a full page: for forks.
    pub(crate) fn share(&self) -> Page {
        let mut ledger = self.ledger.borrow_mut();
        ledger.hold(self.id);
        Page { id: self.id, ledger: Rc::clone(&self.ledger) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.ledger.borrow_mut().leave(self.id);
    }
}
