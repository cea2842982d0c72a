//! The task that sends spans, in batches, and counts those that are lost.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::sync::mpsc::Receiver;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{CLOSE, EXPORT};

/// Spans sent at once.
const BATCH: usize = 512;

/// How long a span waits for others to be sent with.
const GATHER: Duration = Duration::from_secs(1);

/// How often the log says that spans are lost.
const TELL: Duration = Duration::from_secs(60);

/// What became of spans.
#[derive(Debug, Default)]
pub(super) struct Counts {
    sent: AtomicU64,
    lost: AtomicU64,
    told: Mutex<Option<Instant>>,
}

impl Counts {
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Spans are lost. The log says so at most once a minute.
    pub(super) fn lose(&self, spans: usize, why: &str) {
        let lost = self.lost.fetch_add(spans as u64, Relaxed) + spans as u64;
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|told| told.elapsed() >= TELL) {
            *told = Some(Instant::now());
            tracing::warn!(lost, why, "spans are lost");
        }
    }
}

/// Sends what comes until there is no one left to send; once it is closing, sends what is there, for [`CLOSE`]
/// at most.
pub(super) async fn export_all(
    exporter: impl SpanExporter,
    mut waiting: Receiver<SpanData>,
    closing: CancellationToken,
    counts: std::sync::Arc<Counts>,
) {
    let mut over = pin!(async {
        closing.cancelled().await;
        sleep(CLOSE).await;
    });
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        tokio::select! {
            biased;
            () = closing.cancelled() => {
                // From here on nothing waits for more to come.
                waiting.close();
                while fill(&mut waiting, &mut batch).await {}
            }
            () = gather(&mut waiting, &mut batch) => {}
        }
        if batch.is_empty() {
            return;
        }
        let count = batch.len();
        let sending =
            timeout(EXPORT, exporter.export(std::mem::replace(&mut batch, Vec::with_capacity(BATCH))));
        let failure = tokio::select! {
            sent = sending => match sent {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("the collector did not answer within {} s", EXPORT.as_secs())),
            },
            () = &mut over => {
                counts.lose(count + waiting.len(), "the server stopped before the collector took them");
                return;
            }
        };
        match failure {
            None => _ = counts.sent.fetch_add(count as u64, Relaxed),
            Some(why) => counts.lose(count, &why),
        }
    }
}

/// Waits for a span, and a little for more. Dropped half way, it leaves in the batch what it has.
async fn gather(waiting: &mut Receiver<SpanData>, batch: &mut Vec<SpanData>) {
    if !batch.is_empty() || fill(waiting, batch).await {
        let more = async { while fill(waiting, batch).await {} };
        let _ = timeout(GATHER, more).await;
    }
}

/// Waits for spans and takes those that the batch has room for. Returns whether there were any.
async fn fill(waiting: &mut Receiver<SpanData>, batch: &mut Vec<SpanData>) -> bool {
    let room = BATCH - batch.len();
    waiting.recv_many(batch, room).await > 0
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
    use tokio::sync::mpsc;

    use super::super::spans::tests::span;
    use super::*;

    /// A collector that takes, refuses, or never answers.
    #[derive(Debug, Clone, Copy)]
    enum Collector {
        Takes,
        Refuses,
        Hangs,
    }

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            assert!((1..=BATCH).contains(&batch.len()));
            match self {
                Self::Takes => Ok(()),
                Self::Refuses => Err(OTelSdkError::InternalFailure("no".into())),
                Self::Hangs => std::future::pending().await,
            }
        }
    }

    /// What becomes of spans that wait when a server stops, and how long that takes.
    async fn sent_lost(collector: Collector, spans: usize) -> (u64, u64, Duration) {
        let (queue, waiting) = mpsc::channel(spans);
        for _ in 0..spans {
            queue.try_send(span()).unwrap();
        }
        let (counts, closing) = (Arc::<Counts>::default(), CancellationToken::new());
        let sender = tokio::spawn(export_all(collector, waiting, closing.clone(), counts.clone()));
        tokio::task::yield_now().await;
        let start = Instant::now();
        closing.cancel();
        sender.await.unwrap();
        assert!(queue.try_send(span()).is_err(), "nothing is taken any more");
        (counts.sent(), counts.lost(), start.elapsed())
    }

    #[tokio::test]
    async fn a_stop_sends_what_waits_and_counts_what_is_lost() {
        let spans = 2 * BATCH + 7;
        let all = spans as u64;
        let (sent, lost, took) = sent_lost(Collector::Takes, spans).await;
        assert_eq!((sent, lost), (all, 0));
        assert!(took < CLOSE, "{took:?}");
        let (sent, lost, took) = sent_lost(Collector::Refuses, spans).await;
        assert_eq!((sent, lost), (0, all));
        assert!(took < CLOSE, "{took:?}");
        let (sent, lost, took) = sent_lost(Collector::Hangs, spans).await;
        assert_eq!((sent, lost), (0, all));
        assert!(took < CLOSE + Duration::from_secs(1), "{took:?}");
    }

    #[tokio::test]
    async fn spans_are_sent_without_waiting_for_a_full_batch() {
        let (queue, waiting) = mpsc::channel(8);
        let (counts, closing) = (Arc::<Counts>::default(), CancellationToken::new());
        let sender = tokio::spawn(export_all(Collector::Takes, waiting, closing, counts.clone()));
        queue.send(span()).await.unwrap();
        let start = Instant::now();
        while counts.sent() == 0 && start.elapsed() < 10 * GATHER {
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(counts.sent(), 1);
        drop(queue);
        sender.await.unwrap();
    }
}
