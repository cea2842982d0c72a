//! The journal: one line of JSON for each request that went through policies, written when its answer is over. What
//! was asked, what was answered, which plan came of it and why; the prompt's text only where the operator asks.
//!
//! docs/journal.md describes the fields. `forkpoint policy replay` runs a policy over a journal with no model.

mod files;
mod record;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::broadcast;

use self::files::Files;
pub(crate) use self::record::shorten;
pub use self::record::{Kind, Outcome, Record, SessionRecord, Turn, UNFINISHED, VERSION};
use crate::config::Bytes;

/// Records that a new reader of the stream can be given.
const RECENT: usize = 1_000;
/// Bytes of lines kept for that.
const RECENT_BYTES: usize = 8 << 20;
/// Records that a slow reader of the stream may fall behind.
const BEHIND: usize = 1_024;
/// Bytes of lines that may wait for a slow disk; more are lost, and counted.
const WAITING_BYTES: u64 = 64 << 20;

/// How the journal is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalOptions {
    /// The folder of its files; none keeps the last records in memory alone.
    pub dir: Option<PathBuf>,
    /// Write prompts, tools and headers down as well.
    pub prompts: bool,
    /// A file is followed by another once it has so many bytes.
    pub max_file: Bytes,
    /// The oldest files are removed once all have so many bytes.
    pub max_total: Bytes,
}

/// A record and its line.
#[derive(Debug)]
pub struct Entry {
    /// What it says.
    pub record: Record,
    /// The same as JSON, without the line's end.
    pub line: String,
}

/// The journal of a server.
pub struct Journal {
    prompts: bool,
    recent: Mutex<Recent>,
    live: broadcast::Sender<Arc<Entry>>,
    /// None once the journal is closed.
    writer: Mutex<Option<Writer>>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Recent {
    entries: VecDeque<Arc<Entry>>,
    bytes: usize,
}

struct Writer {
    lines: std::sync::mpsc::Sender<Arc<Entry>>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    lost: AtomicU64,
    waiting_bytes: AtomicU64,
}

impl Journal {
    /// Opens the journal and starts its writer.
    ///
    /// # Errors
    /// When its folder cannot be made or written.
    pub fn open(options: &JournalOptions) -> std::io::Result<Arc<Self>> {
        let counts = Arc::<Counts>::default();
        let writer = match &options.dir {
            None => None,
            Some(dir) => {
                let files = Files::open(dir, options.max_file.0, options.max_total.0)?;
                let (lines, waiting) = std::sync::mpsc::channel();
                let mine = counts.clone();
                let thread = std::thread::Builder::new()
                    .name("journal".into())
                    .spawn(move || write_all(files, &waiting, &mine))?;
                Some(Writer { lines, thread })
            }
        };
        let (live, _) = broadcast::channel(BEHIND);
        let (recent, writer) = (Mutex::default(), Mutex::new(writer));
        Ok(Arc::new(Self { prompts: options.prompts, recent, live, writer, counts }))
    }

    /// Whether prompts are written down.
    #[must_use]
    pub fn keeps_prompts(&self) -> bool {
        self.prompts
    }

    /// Writes a record. Never waits for the disk.
    pub fn write(&self, record: Record) {
        let line = match serde_json::to_string(&record) {
            Ok(line) => line,
            Err(error) => {
                tracing::error!(%error, "a record of the journal is no JSON");
                self.counts.lost.fetch_add(1, Relaxed);
                return;
            }
        };
        let entry = Arc::new(Entry { record, line });
        {
            let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            recent.push(entry.clone());
            // Under the lock, so that a new reader sees each record once.
            let _ = self.live.send(entry.clone());
        }
        let bytes = entry.line.len() as u64;
        if let Some(writer) = &*self.writer() {
            if self.counts.waiting_bytes.fetch_add(bytes, Relaxed) + bytes > WAITING_BYTES {
                self.counts.waiting_bytes.fetch_sub(bytes, Relaxed);
                self.counts.lost.fetch_add(1, Relaxed);
            } else if writer.lines.send(entry).is_err() {
                self.counts.lost.fetch_add(1, Relaxed);
            }
        }
    }

    /// The last records, oldest first, and those that come.
    #[must_use]
    pub fn read(&self, last: usize) -> (Vec<Arc<Entry>>, broadcast::Receiver<Arc<Entry>>) {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let skipped = recent.entries.len().saturating_sub(last);
        (recent.entries.iter().skip(skipped).cloned().collect(), self.live.subscribe())
    }

    /// Records that are on the disk.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.counts.written.load(Relaxed)
    }

    /// Records that the disk did not take.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.counts.lost.load(Relaxed)
    }

    /// Writes what waits, and ends the writer.
    pub fn close(&self) {
        let Some(Writer { lines, thread }) = self.writer().take() else { return };
        drop(lines);
        if thread.join().is_err() {
            tracing::error!("the journal's writer panicked");
        }
    }

    fn writer(&self) -> MutexGuard<'_, Option<Writer>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("prompts", &self.prompts).field("counts", &self.counts).finish()
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.close();
    }
}

impl Recent {
    fn push(&mut self, entry: Arc<Entry>) {
        self.bytes += entry.line.len();
        self.entries.push_back(entry);
        while self.entries.len() > RECENT || (self.bytes > RECENT_BYTES && self.entries.len() > 1) {
            let oldest = self.entries.pop_front();
            self.bytes -= oldest.map_or(0, |entry| entry.line.len());
        }
    }
}

fn write_all(mut files: Files, waiting: &std::sync::mpsc::Receiver<Arc<Entry>>, counts: &Counts) {
    let mut broken = false;
    while let Ok(entry) = waiting.recv() {
        counts.waiting_bytes.fetch_sub(entry.line.len() as u64, Relaxed);
        match files.append(&entry.line) {
            Ok(()) => {
                counts.written.fetch_add(1, Relaxed);
                if std::mem::take(&mut broken) {
                    tracing::info!("the journal is written again");
                }
            }
            Err(error) => {
                counts.lost.fetch_add(1, Relaxed);
                // Said once, not for each request of a server whose disk is full.
                if !std::mem::replace(&mut broken, true) {
                    tracing::error!(%error, "the journal cannot be written; records are lost until it can");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(dir: Option<&std::path::Path>) -> JournalOptions {
        let (max_file, max_total) = (Bytes(1 << 20), Bytes(4 << 20));
        JournalOptions { dir: dir.map(Into::into), prompts: false, max_file, max_total }
    }

    fn record(id: &str) -> Record {
        Record { v: VERSION, id: id.into(), ..Record::default() }
    }

    #[test]
    fn what_is_written_is_on_the_disk_once_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(&options(Some(folder.path()))).unwrap();
        (0..100).for_each(|n| journal.write(record(&n.to_string())));
        journal.close();
        assert_eq!((journal.written(), journal.lost()), (100, 0));
        let read = Record::read_all(folder.path()).unwrap();
        let ids: Vec<String> = read.records.into_iter().map(|record| record.id).collect();
        assert_eq!(ids, (0..100).map(|n| n.to_string()).collect::<Vec<_>>());
        journal.write(record("late"));
        assert_eq!(journal.written(), 100, "closed");
    }

    #[test]
    fn a_reader_sees_each_record_once() {
        let journal = Journal::open(&options(None)).unwrap();
        journal.write(record("a"));
        journal.write(record("b"));
        let (recent, mut live) = journal.read(1);
        assert_eq!(recent.iter().map(|entry| entry.record.id.as_str()).collect::<Vec<_>>(), ["b"]);
        journal.write(record("c"));
        assert_eq!(live.try_recv().unwrap().record.id, "c");
        assert!(live.try_recv().is_err());
        (0..2 * RECENT).for_each(|_| journal.write(record("x")));
        assert_eq!(journal.read(usize::MAX).0.len(), RECENT);
    }

    #[test]
    fn a_folder_that_goes_is_survived_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("journal");
        let journal = Journal::open(&options(Some(&dir))).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        journal.write(record("a"));
        journal.close();
        // The folder is made again.
        assert_eq!((journal.written(), journal.lost()), (1, 0));
        // A file in the folder's place cannot be mended.
        let blocked = folder.path().join("file");
        std::fs::write(&blocked, b"x").unwrap();
        assert!(Journal::open(&options(Some(&blocked))).is_err());
    }
}
