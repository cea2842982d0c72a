//! The probes of a server's policies: found beside them, fitted in the background, kept.
//!
//! A probe that was fitted to a policy's examples on this model, from beside them or from the cache, answers at once;
//! else label reads answer until it is fitted. A probe whose examples changed answers on until the new one is fitted,
//! and when that fails.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forkpoint_engine::probe::{self, Examples, Probe, ProbeError, Quality};
use forkpoint_engine::{Engine, Question, Rung};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::shipped::{Origin, read_artifact};

/// Examples that label reads answer too, to compare.
const LABEL_READS: usize = 40;
/// How often a fit is looked at that nobody may wait for any more.
const GIVEN_UP: Duration = Duration::from_millis(500);
/// How much worse than label reads a probe may seem before it is warned of: the noise of so few examples.
const SLACK: f64 = 0.05;

/// All probes, and the task that fits them one after the other.
pub(crate) struct Shelf {
    engine: Engine,
    /// Where fitted probes are kept; none fits them anew at each start.
    cache: Option<PathBuf>,
    fits: mpsc::UnboundedSender<Fit>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

/// The probes of one policy, by name.
pub(crate) type Probes = BTreeMap<String, Arc<Entry>>;

/// One probe.
pub(crate) struct Entry {
    /// `policy/probe`.
    name: String,
    /// The hash of its examples, or why there are none.
    source: Result<u128, String>,
    state: Mutex<State>,
    fitted: AtomicUsize,
    answers: [AtomicU64; 2],
}

#[derive(Clone)]
struct State {
    /// What answers; none leaves it to label reads.
    probe: Option<Arc<Probe>>,
    /// It came with the policy, and this server did not fit it.
    given: bool,
    fitting: bool,
    error: Option<String>,
    warnings: Vec<String>,
    kind: Option<&'static str>,
    question: Option<String>,
    labels: BTreeMap<String, usize>,
    examples: usize,
}

/// A probe to be fitted.
struct Fit {
    entry: Arc<Entry>,
    examples: Arc<Examples>,
}

/// Whether a probe answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeState {
    /// It answers.
    Ready,
    /// It is being fitted, or waits for it: an older one or label reads answer.
    Fitting,
    /// It cannot be fitted: an older one or label reads answer.
    Failed,
}

/// A probe as operators see it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbeStatus {
    /// Whether it answers.
    pub state: ProbeState,
    /// `choice`, `boolean` or `score`, once its examples were read.
    pub kind: Option<&'static str>,
    /// Examples of each label.
    pub labels: BTreeMap<String, usize>,
    /// Examples whose features were read, while it is being fitted.
    pub fitted: Option<usize>,
    /// All examples, those out of scope included.
    pub examples: usize,
    /// How good what answers is; of older examples while newer ones are being fitted.
    pub quality: Option<Quality>,
    /// What its author should look at.
    pub warnings: Vec<String>,
    /// Why its examples cannot be used.
    pub error: Option<String>,
    /// Answers since it was loaded, by what gave them.
    pub answers: BTreeMap<&'static str, u64>,
}

impl Entry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `policy/probe`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What answers now.
    pub(crate) fn probe(&self) -> Option<Arc<Probe>> {
        self.state().probe.clone()
    }

    /// A question as label reads are asked it: with the words of the examples where it has none of its own.
    pub(crate) fn worded(&self, question: &Question) -> Question {
        let words = self.state().question.clone().filter(|_| question.instructions.trim().is_empty());
        Question { instructions: words.unwrap_or_else(|| question.instructions.clone()), ..question.clone() }
    }

    /// Counts an answer.
    pub(crate) fn count(&self, rung: Rung) {
        self.answers[usize::from(rung == Rung::Probe)].fetch_add(1, Relaxed);
    }

    /// For operators.
    pub(crate) fn status(&self) -> ProbeStatus {
        let state = self.state().clone();
        let fitting = state.fitting;
        ProbeStatus {
            state: match (&state.error, fitting) {
                (Some(_), _) => ProbeState::Failed,
                (None, true) => ProbeState::Fitting,
                (None, false) => ProbeState::Ready,
            },
            kind: state.kind,
            labels: state.labels,
            fitted: fitting.then(|| self.fitted.load(Relaxed)),
            examples: state.examples,
            quality: state.probe.map(|probe| probe.quality.clone()),
            warnings: state.warnings,
            error: state.error,
            answers: [("labels", 0), ("probe", 1)]
                .map(|(rung, at)| (rung, self.answers[at].load(Relaxed)))
                .into(),
        }
    }
}

impl Shelf {
    /// An empty shelf; must be called on a runtime.
    pub(crate) fn new(engine: Engine, cache: Option<PathBuf>) -> Arc<Self> {
        let (fits, mut waiting) = mpsc::unbounded_channel::<Fit>();
        let worker = Mutex::default();
        let shelf = Arc::new(Self { engine: engine.clone(), cache: cache.clone(), fits, worker });
        let work = async move {
            while let Some(fit) = waiting.recv().await {
                fit.run(&engine, cache.as_deref()).await;
            }
        };
        *shelf.worker.lock().unwrap_or_else(PoisonError::into_inner) = Some(tokio::spawn(work));
        shelf
    }

    /// Reads a policy's examples. What did not change stays as it was `before`, what is new is taken from beside them,
    /// from the cache, or fitted.
    pub(crate) async fn load(&self, policy: &str, origin: Origin, before: &Probes) -> Probes {
        let read = tokio::task::spawn_blocking(move || origin.read()).await.unwrap_or_default();
        let layer = probe::layer(self.engine.model().layers);
        let kept = if read.is_empty() { Ok(()) } else { self.engine.keep_hidden(&[layer]).await };
        let mut now = Probes::new();
        for (name, shipped) in read {
            let old = before.get(&name).filter(|old| !(shipped.signed && old.state().given));
            let source = shipped.examples.as_ref().map(|examples| examples.hash).map_err(Clone::clone);
            let fitted = shipped.examples.as_ref().ok().and_then(|examples| {
                let cached = self.cache.as_deref().map(|cache| cache.join(self.file_name(examples)));
                let cached = cached.and_then(|path| read_artifact(&path)).map(|probe| (probe, false));
                let fits = |(probe, _): &(Probe, bool)| probe.layer == layer && self.fits(probe, examples);
                [shipped.artifact.map(|probe| (probe, true)), cached].into_iter().flatten().find(fits)
            });
            // What failed is tried again, and what waits for a fit need not where one is shipped.
            let settled = |old: &Entry| match old.status().state {
                ProbeState::Ready => true,
                ProbeState::Fitting => fitted.is_none(),
                ProbeState::Failed => source.is_err(),
            };
            if let Some(old) = old.filter(|old| old.source == source && settled(old)) {
                now.insert(name, Arc::clone(old));
                continue;
            }
            // An older probe answers on where it answers the same question.
            let older = old.and_then(|old| old.probe()).filter(|probe| {
                shipped
                    .examples
                    .as_ref()
                    .map_or(true, |new| new.kind == probe.kind && new.labels == probe.labels)
            });
            let mut state = State {
                given: older.is_some() && old.is_some_and(|old| old.state().given),
                probe: older,
                question: None,
                fitting: false,
                error: None,
                warnings: Vec::new(),
                kind: None,
                labels: BTreeMap::new(),
                examples: 0,
            };
            let full = format!("{policy}/{name}");
            let mut fit = None;
            match (shipped.examples, &kept) {
                (Ok(examples), Ok(())) => {
                    state.describe(&examples);
                    match fitted {
                        Some((probe, given)) => state.answer_with(&full, probe, given),
                        None => {
                            state.fitting = true;
                            fit = Some(examples);
                        }
                    }
                }
                (Ok(examples), Err(error)) => {
                    state.describe(&examples);
                    state.error = Some(error.to_string());
                }
                (Err(error), _) => state.error = Some(error),
            }
            for warning in &state.warnings {
                tracing::warn!(target: "policy", policy, probe = name, "{warning}");
            }
            if let Some(error) = &state.error {
                tracing::warn!(target: "policy", policy, probe = name, error, "not fitted");
            }
            let entry = Arc::new(Entry {
                name: full,
                source,
                state: Mutex::new(state),
                fitted: AtomicUsize::new(0),
                answers: Default::default(),
            });
            if let Some(examples) = fit {
                // The worker ends with the server.
                let _ = self.fits.send(Fit { entry: Arc::clone(&entry), examples });
            }
            now.insert(name, entry);
        }
        now
    }

    /// Ends the fit that is under way.
    pub(crate) async fn stop(&self) {
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(worker) = worker {
            worker.abort();
            // Aborted, as it should be.
            let _ = worker.await;
        }
    }

    /// Whether a probe was fitted to these examples on this model, and says the same of them.
    fn fits(&self, probe: &Probe, examples: &Examples) -> bool {
        let same =
            (probe.kind, &probe.labels, probe.span) == (examples.kind, &examples.labels, examples.span);
        probe.fits(self.engine.model()) && probe.examples == examples.hash && same
    }

    fn file_name(&self, examples: &Examples) -> String {
        artifact_name(self.engine.model().fingerprint, examples)
    }
}

/// The probe of a name.
///
/// # Errors
/// Names those that there are.
pub(crate) fn find<'a>(probes: &'a Probes, name: &str) -> Result<&'a Arc<Entry>, String> {
    probes.get(name).ok_or_else(|| {
        let there: Vec<&str> = probes.keys().map(String::as_str).collect();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        format!("there is no probe {name:?}; the policy ships {there}")
    })
}

impl State {
    fn describe(&mut self, examples: &Examples) {
        self.kind = Some(examples.kind.name());
        self.question.clone_from(&examples.question);
        self.labels = examples.labels.iter().cloned().zip(examples.counts()).collect();
        self.examples = examples.examples.len();
        self.warnings.clone_from(&examples.warnings);
    }

    fn answer_with(&mut self, name: &str, probe: Probe, given: bool) {
        let quality = &probe.quality;
        if let Some(reads) = quality.label_reads
            && quality.accuracy + SLACK < reads.accuracy
        {
            let warning = format!(
                "the probe is right on {:.0} % of its examples, label reads on {:.0} %: do without it, or add examples",
                100.0 * quality.accuracy,
                100.0 * reads.accuracy
            );
            tracing::warn!(target: "policy", probe = name, "{warning}");
            self.warnings.push(warning);
        }
        (self.probe, self.given, self.fitting) = (Some(Arc::new(probe)), given, false);
    }
}

impl Fit {
    async fn run(self, engine: &Engine, cache: Option<&Path>) {
        let Self { entry, examples } = self;
        let name = entry.name.as_str();
        // Newer examples have taken its place.
        if Arc::strong_count(&entry) == 1 {
            return;
        }
        let (all, file) = (examples.examples.len(), artifact_name(engine.model().fingerprint, &examples));
        tracing::info!(target: "policy", probe = name, examples = all, "fitting");
        let fitted = async {
            let progress = |done| entry.fitted.store(done, Relaxed);
            let learned = engine.learn(Examples::clone(&examples), progress).await?;
            let mut probe = behind_others(move || learned.fit()).await?;
            {
                let mut state = entry.state();
                (state.probe, state.given) = (Some(Arc::new(probe.clone())), false);
            }
            match engine.read_labels(&examples, LABEL_READS).await {
                Ok(read) => probe.quality.label_reads = read.map(|read| read.quality(&examples)),
                // Of a model that reads no labels, or examples that leave the question no room.
                Err(error) => {
                    tracing::info!(target: "policy", probe = name, %error, "label reads were not measured")
                }
            }
            Ok::<_, ProbeError>(probe)
        };
        let fitted = tokio::select! {
            fitted = fitted => fitted,
            () = given_up(&entry) => return,
        };
        match fitted {
            Ok(probe) => {
                let quality = &probe.quality;
                let (accuracy, ece) = (format!("{:.2}", quality.accuracy), format!("{:.3}", quality.ece));
                tracing::info!(target: "policy", probe = name, accuracy, ece, "fitted");
                if let Some(cache) = cache
                    && let Err(error) = keep(cache, &file, &probe)
                {
                    tracing::warn!(target: "policy", probe = name, %error, "the fitted probe is not kept");
                }
                entry.state().answer_with(name, probe, false);
            }
            Err(error) => {
                tracing::warn!(target: "policy", probe = name, %error, "not fitted");
                let mut state = entry.state();
                (state.fitting, state.error) = (false, Some(error.to_string()));
            }
        }
    }
}

/// Returns once nobody but its fit holds a probe: newer examples took its place, or its policy is gone.
async fn given_up(entry: &Arc<Entry>) {
    while Arc::strong_count(entry) > 1 {
        tokio::time::sleep(GIVEN_UP).await;
    }
}

/// Runs what takes seconds of a processor on a thread that gives way to all others.
async fn behind_others<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ProbeError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let broken = |error: String| ProbeError::Broken(error);
    std::thread::Builder::new()
        .name("probe-fit".into())
        .spawn(move || {
            // On Linux this is the thread's own; elsewhere the fit takes its share.
            #[cfg(target_os = "linux")]
            let _ = rustix::process::nice(19);
            drop(sender.send(work()));
        })
        .map_err(|error| broken(error.to_string()))?;
    receiver.await.map_err(|_| broken("its thread ended".into()))
}

/// A name that says what a probe was fitted from and on.
fn artifact_name(model: u128, examples: &Examples) -> String {
    format!("{model:032x}-{:032x}.probe.json", examples.hash)
}

/// Writes beside the target and renames: a start that comes between finds the old file or the new one.
fn keep(cache: &Path, name: &str, probe: &Probe) -> std::io::Result<()> {
    std::fs::create_dir_all(cache)?;
    let file = tempfile::NamedTempFile::new_in(cache)?;
    std::fs::write(file.path(), probe.to_json())?;
    file.persist(cache.join(name)).map_err(|error| error.error)?;
    Ok(())
}
