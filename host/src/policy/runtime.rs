//! The WebAssembly runtime that all policies share: one engine, one pool of instances, one clock tick.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use wasmtime::component::Linker;
use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Store, UpdateDeadline,
};

use super::contract;
use super::guest::{Halt, State};
use super::instance::Instance;
use super::registry::Published;
use super::settings::PolicyOptions;
use super::waiting::{WARM_FOR, Waiting};

/// Elements of the largest table: languages that compile to WebAssembly with their runtime need tens of thousands.
pub(super) const TABLE_ELEMENTS: usize = 40_000;

/// How often the epoch advances while a guest runs: what a guest may overrun its processor time by, and how long
/// it holds a thread before others get their turn.
const TICK: Duration = Duration::from_millis(1);

/// Ticks without a guest before the ticking thread sleeps: to wake it costs as much as a short call.
const LINGER: u32 = 100;

/// Most bytes that one call may copy out of a guest, which bounds what a plan or question can be.
const LIFTED: usize = 16 << 20;

/// How long the last calls may take when the server stops.
const LAST_CALLS: Duration = Duration::from_secs(30);

/// Most memories of a component. Most languages need one; QuickJS and its adapters have three.
const MEMORIES: u32 = 4;

/// Bytes that stay with the large memories of all places together, and with one of them.
const RESIDENT: usize = 1 << 30;
const LEAST_RESIDENT: usize = 256 << 10;
const MOST_RESIDENT: usize = 4 << 20;

/// Most tables of a component, and core instances in it: componentize-py links some dozens of modules.
const TABLES: u32 = 40;
const CORE_INSTANCES: u32 = 60;

/// Instances besides those of requests: canary calls of new components.
pub(super) const CANARIES: u32 = 2;

/// Why the policies could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// WebAssembly cannot run here.
    #[error("cannot set up WebAssembly: {0}")]
    Runtime(String),
    /// A thread could not be started.
    #[error("cannot start the thread {name}: {cause}")]
    Thread {
        /// Of the thread.
        name: &'static str,
        /// Why.
        cause: std::io::Error,
    },
    /// The folder for what outlives the server cannot be had.
    #[error("cannot use the state folder {}: {cause}", dir.display())]
    State {
        /// The folder.
        dir: std::path::PathBuf,
        /// Why.
        cause: String,
    },
    /// The settings ask for what the pool cannot give.
    #[error("limits.memory_mb of {policy} is {asked}; at most {most} can be given")]
    Memory {
        /// Whose limits.
        policy: String,
        /// MiB asked for.
        asked: u64,
        /// MiB that a 32-bit memory can hold.
        most: u64,
    },
}

/// What runs guests.
pub(super) struct Runtime {
    pub(super) engine: Engine,
    /// The imports of every version of the contract; each component adds its own denials of WASI.
    pub(super) linker: Linker<State>,
    /// One permit for each call that there may be at once.
    pub(super) places: Arc<Semaphore>,
    /// Instances of stateless policies.
    pub(super) warm: Arc<Waiting<Published, Instance>>,
    /// Instances made ahead.
    pub(super) ready: Arc<Waiting<Published, Instance>>,
    /// What makes them, and what ends those whose call is over.
    pub(super) background: TaskTracker,
    concurrency: u32,
    metered: bool,
    ticker: Ticker,
}

/// How many instances there may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Instances {
    /// In calls at once.
    pub(super) calls: u32,
    /// Warm ones between them.
    pub(super) warm: u32,
    /// Made ahead.
    pub(super) ready: u32,
}

impl Runtime {
    /// Sets up an engine for so many instances, which have at most `memory` bytes each. A metered one counts the guests'
    /// instructions.
    pub(super) fn new(instances: Instances, memory: usize, metered: bool) -> Result<Self, StartError> {
        let concurrency = instances.calls.clamp(1, PolicyOptions::MOST_PLACES);
        let waiting = [instances.warm, instances.ready];
        let [warm, ready] = waiting.map(|waiting| waiting.min(PolicyOptions::MOST_WAITING));
        let pool = pool(concurrency + CANARIES + warm + ready, memory);
        let engine = match Engine::new(config(Some(pool)).consume_fuel(metered)) {
            Ok(engine) => engine,
            Err(error) => {
                tracing::warn!(
                    target: "policy",
                    "no pool of WebAssembly instances ({error:#}): each call allocates its own memory, which \
                     is several times slower. Is the address space limited (ulimit -v)?"
                );
                Engine::new(config(None).consume_fuel(metered))
                    .map_err(|error| StartError::Runtime(format!("{error:#}")))?
            }
        };
        let mut linker = Linker::new(&engine);
        contract::add_to_linker(&mut linker).map_err(|error| StartError::Runtime(format!("{error:#}")))?;
        let ticker = Ticker::start(engine.clone())?;
        let places = Arc::new(Semaphore::new(concurrency as usize));
        let warm = Arc::new(Waiting::new(warm, Some(WARM_FOR)));
        let ready = Arc::new(Waiting::new(ready, None));
        let background = TaskTracker::new();
        Ok(Self { engine, linker, places, warm, ready, background, concurrency, metered, ticker })
    }

    /// A store for one call, bounded in memory and processor time.
    pub(super) fn store(&self, state: State) -> Store<State> {
        let mut store = Store::new(&self.engine, state);
        store.limiter(|state| state);
        store.set_hostcall_fuel(LIFTED);
        self.wind_up(&mut store);
        store.epoch_deadline_callback(|context| {
            let state = context.data();
            if state.clock.pause() > state.limits.cpu() {
                return Err(Halt::Cpu(state.limits.cpu_ms).into());
            }
            // Wasmtime's own yield may be polled again before any other task of this thread.
            let clock = state.clock.clone();
            let turn = async move {
                tokio::task::yield_now().await;
                clock.resume();
            };
            Ok(UpdateDeadline::YieldCustom(1, Box::pin(turn)))
        });
        store
    }

    /// Makes the store of an instance that waited ready for its call: of a warm one, or of one that had none yet.
    pub(super) fn renew(&self, store: &mut Store<State>, state: State, warm: bool) {
        let next = store.data().followed_by(state, warm);
        *store.data_mut() = next;
        self.wind_up(store);
    }

    fn wind_up(&self, store: &mut Store<State>) {
        if self.metered {
            store.set_fuel(u64::MAX).expect("the engine is one that counts");
        }
        store.set_epoch_deadline(1);
    }

    /// The epoch advances while what this returns lives.
    pub(super) fn tick(&self) -> Ticking<'_> {
        self.ticker.tick()
    }

    /// Waits until no call runs and no instance is made, and ends the epoch's thread. Calls that come later find the pool
    /// busy.
    pub(super) async fn stop(&self) {
        // Without ticks nothing would interrupt a guest that spins. Taking every place waits for all that have one.
        match tokio::time::timeout(LAST_CALLS, self.places.acquire_many(self.concurrency)).await {
            Ok(Ok(all)) => all.forget(),
            // Stopped before.
            Ok(Err(_)) => {}
            Err(_) => tracing::error!(target: "policy", "calls of policies still run"),
        }
        self.background.close();
        if tokio::time::timeout(LAST_CALLS, self.background.wait()).await.is_err() {
            tracing::error!(target: "policy", "instances of policies are still being made");
        }
        self.places.close();
        self.ticker.stop();
    }
}

/// The configuration that policies run on, for measuring what the host adds to it.
pub(crate) fn pooled_config(concurrency: u32, memory: usize) -> Config {
    config(Some(pool(concurrency.clamp(1, PolicyOptions::MOST_PLACES) + CANARIES, memory)))
}

fn config(pool: Option<PoolingAllocationConfig>) -> Config {
    let mut config = Config::new();
    config.wasm_component_model(true);
    config.concurrency_support(false);
    config.epoch_interruption(true);
    config.memory_init_cow(true);
    // Python and QuickJS recurse deeply; the other half is for the host's functions, which run on this stack too.
    config.max_wasm_stack(1 << 20);
    config.async_stack_size(2 << 20);
    if let Some(pool) = pool {
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    }
    config
}

/// A pool in which `instances` components of the largest allowed shape fit at once, so that it is never exhausted
/// by fewer.
fn pool(instances: u32, memory: usize) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(instances)
        .total_core_instances(instances * CORE_INSTANCES)
        .total_memories(instances * MEMORIES)
        .total_tables(instances * TABLES)
        .total_stacks(instances)
        .max_core_instances_per_component(CORE_INSTANCES)
        .max_memories_per_component(MEMORIES)
        .max_tables_per_component(TABLES)
        .table_elements(TABLE_ELEMENTS)
        .max_component_instance_size(4 << 20)
        .max_core_instance_size(4 << 20)
        .max_memory_size(memory)
        .max_unused_warm_slots(instances.min(16))
        // Linux 6.7 tells which pages were touched: they are reset in place, and the next call faults on none.
        .pagemap_scan(Enabled::Auto)
        .linear_memory_keep_resident(resident(
            instances,
            PoolingAllocationConfig::is_pagemap_scan_available(),
        ))
        .table_keep_resident(512 << 10);
    pool
}

/// Bytes of a memory that stay with its place from call to call. Where the kernel tells what was touched: with a
/// sixteenth of the most, a call of Go's runtime faulted on 88 pages, and with all of it on none; Python's still on some
/// 300. After a burst they stay with every place, so all together have a bound; of a component's memories one is large.
/// Where the kernel does not tell, as many are zeroed at each end, touched or not.
fn resident(instances: u32, told: bool) -> usize {
    let share = RESIDENT / instances as usize;
    if told { share.clamp(LEAST_RESIDENT, MOST_RESIDENT) } else { LEAST_RESIDENT }
}

/// The thread that advances the epoch while any guest runs or ran of late, and sleeps otherwise.
struct Ticker {
    shared: Arc<Shared>,
    wake: Thread,
    thread: std::sync::Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    running: AtomicUsize,
    stop: AtomicBool,
}

impl Ticker {
    fn start(engine: Engine) -> Result<Self, StartError> {
        let shared = Arc::new(Shared::default());
        let mine = shared.clone();
        let name = "policy-epoch";
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let mut idle = 0;
                while !mine.stop.load(Ordering::Acquire) {
                    idle = if mine.running.load(Ordering::Acquire) == 0 { idle + 1 } else { 0 };
                    if idle > LINGER {
                        std::thread::park();
                        idle = 0;
                    }
                    std::thread::sleep(TICK);
                    engine.increment_epoch();
                }
            })
            .map_err(|cause| StartError::Thread { name, cause })?;
        let wake = thread.thread().clone();
        Ok(Self { shared, wake, thread: std::sync::Mutex::new(Some(thread)) })
    }

    fn tick(&self) -> Ticking<'_> {
        if self.shared.running.fetch_add(1, Ordering::AcqRel) == 0 {
            self.wake.unpark();
        }
        Ticking(&self.shared.running)
    }

    fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wake.unpark();
        let thread = self.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(target: "policy", "the epoch's thread panicked");
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Keeps the epoch advancing.
pub(super) struct Ticking<'a>(&'a AtomicUsize);

impl Drop for Ticking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_resident_has_a_bound_over_all_places() {
        for instances in [1, 64, 66, 360, 1_002] {
            let each = resident(instances, true);
            let all = each * instances as usize;
            assert!((LEAST_RESIDENT..=MOST_RESIDENT).contains(&each), "{instances}: {each}");
            assert!(all <= RESIDENT || each == LEAST_RESIDENT, "{instances}: {all}");
            assert_eq!(resident(instances, false), LEAST_RESIDENT);
        }
        assert_eq!((resident(64, true), resident(10_000, true)), (MOST_RESIDENT, LEAST_RESIDENT));
        let default = PolicyOptions::places_for(PolicyOptions::REQUESTS) + CANARIES + PolicyOptions::READY;
        assert_eq!(resident(default, true) >> 20, 2, "at the default, in whole MiB");
    }

    #[tokio::test]
    async fn guests_are_counted_while_they_run_and_a_stop_ends_the_ticking() {
        let runtime = Runtime::new(Instances { calls: 2, warm: 0, ready: 0 }, 64 << 20, false).unwrap();
        let shared = runtime.ticker.shared.clone();
        let guest = runtime.tick();
        assert_eq!(shared.running.load(Ordering::Acquire), 1);
        drop(guest);
        assert_eq!(shared.running.load(Ordering::Acquire), 0);
        runtime.stop().await;
        runtime.stop().await;
        assert!(runtime.ticker.thread.lock().unwrap().is_none(), "joined");
    }
}
