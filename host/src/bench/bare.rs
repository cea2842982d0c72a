//! A policy on wasmtime alone: the yardstick for what the policy host adds.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkpoint_engine::{Message, Role};
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, HasSelf, Linker, LinkerInstance, Resource, ResourceType};
use wasmtime::{Engine, Store};

use super::error::BenchError;
use crate::policy::{RouteRequest, pooled_config};

mod bindings {
    //! Contract 0.1, as wasmtime's own example of embedding a world binds it.

    wasmtime::component::bindgen!({
        path: "../wit",
        world: "policy",
        imports: {
            default: trappable,
            "forkpoint:policy/engine.decide": async | trappable,
            "forkpoint:policy/engine.generate": async | trappable,
            "forkpoint:policy/engine.[method]session.fork": async | trappable,
            "forkpoint:policy/engine.[method]session.append": async | trappable,
            "forkpoint:policy/engine.[method]session.usage": async | trappable,
        },
        exports: { default: async },
    });
}

use bindings::forkpoint::policy::{dispatch, engine, host, types};

/// A component, compiled and linked as the policy host does it, and called with nothing around it: no bounds on time,
/// memory or calls, no journal, no checks of the plan. Questions are answered evenly.
pub(crate) struct Bare {
    engine: Engine,
    pre: bindings::PolicyPre<Even>,
    request: types::Request,
    config: Arc<BTreeMap<String, String>>,
}

impl Bare {
    /// The contract that components must be built against.
    pub(crate) const CONTRACT: &str = "0.1.0";

    /// # Errors
    /// When wasmtime takes the component for none.
    pub(crate) fn new(
        bytes: &[u8],
        concurrency: u32,
        memory: usize,
        request: &RouteRequest,
        config: BTreeMap<String, String>,
    ) -> Result<Self, BenchError> {
        Self::build(bytes, concurrency, memory, request, config)
            .map_err(|error| BenchError::Unfit(format!("bare wasmtime: {error:#}")))
    }

    fn build(
        bytes: &[u8],
        concurrency: u32,
        memory: usize,
        request: &RouteRequest,
        config: BTreeMap<String, String>,
    ) -> wasmtime::Result<Self> {
        let engine = Engine::new(&pooled_config(concurrency, memory))?;
        let component = Component::from_binary(&engine, bytes)?;
        let mut linker = Linker::new(&engine);
        bindings::Policy::add_to_linker::<Even, HasSelf<Even>>(&mut linker, |state| state)?;
        for (name, import) in component.component_type().imports(&engine) {
            if name.starts_with("wasi:")
                && let ComponentItem::ComponentInstance(interface) = import.ty
            {
                let mut instance = linker.instance(name)?;
                for (item, export) in interface.exports(&engine) {
                    deny(&mut instance, item, &export.ty)?;
                }
            }
        }
        let pre = bindings::PolicyPre::new(linker.instantiate_pre(&component)?)?;
        Ok(Self { engine, pre, request: as_guest_sees_it(request), config: Arc::new(config) })
    }

    /// A fresh instance, one call, and the end of both. Returns the plan's reason.
    pub(crate) async fn call(&self) -> wasmtime::Result<String> {
        let mut store = Store::new(&self.engine, Even(self.config.clone()));
        // Nothing advances the epoch; the code that looks at it is the same.
        store.set_epoch_deadline(1);
        let guest = self.pre.instantiate_async(&mut store).await?;
        let routing = guest.call_route(&mut store, &self.request, Resource::new_own(0)).await?;
        let routing = routing.map_err(wasmtime::Error::msg)?;
        Ok(routing.reason)
    }
}

/// Functions of WASI are mentioned by many components, and called by none that is served.
fn deny(instance: &mut LinkerInstance<'_, Even>, item: &str, ty: &ComponentItem) -> wasmtime::Result<()> {
    match ty {
        ComponentItem::ComponentFunc(_) => {
            let name = item.to_owned();
            instance.func_new(item, move |_, _, _, _| Err(wasmtime::Error::msg(format!("{name} was called"))))
        }
        ComponentItem::Resource(_) => instance.resource(item, ResourceType::host::<()>(), |_, _| Ok(())),
        _ => Ok(()),
    }
}

/// The imports with as little behind them as there can be.
pub(crate) struct Even(Arc<BTreeMap<String, String>>);

impl engine::Host for Even {
    async fn decide(
        &mut self,
        _on: Resource<engine::Session>,
        questions: Vec<engine::Question>,
    ) -> wasmtime::Result<Result<Vec<engine::Answer>, engine::Failure>> {
        let even = |count: usize| vec![1.0 / count.max(1) as f64; count];
        let answer = |question: engine::Question| engine::Answer {
            verdict: match question.criteria {
                engine::Criteria::Choice(options) => engine::Verdict::Choice(engine::ChoiceAnswer {
                    probabilities: even(options.len()),
                    choice: options.into_iter().next().map(|option| option.name).unwrap_or_default(),
                    confidence: 0.0,
                }),
                engine::Criteria::Boolean(_) => engine::Verdict::Boolean(0.5),
                engine::Criteria::Score(levels) => engine::Verdict::Score(engine::ScoreAnswer {
                    score: levels.len().saturating_sub(1) as f64 / 2.0,
                    probabilities: even(levels.len()),
                    confidence: 0.0,
                }),
            },
            mass: 1.0,
            rung: engine::Rung::Labels,
        };
        Ok(Ok(questions.into_iter().map(answer).collect()))
    }

    async fn generate(
        &mut self,
        _on: Resource<engine::Session>,
        _sampling: types::Sampling,
    ) -> wasmtime::Result<Result<engine::Completion, engine::Failure>> {
        let (text, finish_reason) = ("A draft.".to_owned(), "stop".to_owned());
        Ok(Ok(engine::Completion { text, tokens: 3, finish_reason }))
    }
}

impl engine::HostSession for Even {
    async fn fork(
        &mut self,
        _this: Resource<engine::Session>,
    ) -> wasmtime::Result<Result<Resource<engine::Session>, engine::Failure>> {
        Ok(Ok(Resource::new_own(0)))
    }

    async fn append(
        &mut self,
        _this: Resource<engine::Session>,
        messages: Vec<types::Message>,
    ) -> wasmtime::Result<Result<u32, engine::Failure>> {
        Ok(Ok(u32::try_from(messages.len()).unwrap_or(u32::MAX)))
    }

    async fn usage(&mut self, _this: Resource<engine::Session>) -> wasmtime::Result<engine::Usage> {
        Ok(engine::Usage { tokens: 1, reused: 0, computed: 1 })
    }

    fn drop(&mut self, _this: Resource<engine::Session>) -> wasmtime::Result<()> {
        Ok(())
    }
}

impl host::Host for Even {
    fn log(&mut self, _level: host::Level, _message: String) -> wasmtime::Result<()> {
        Ok(())
    }

    fn config(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        Ok(self.0.get(&key).cloned())
    }

    fn get(&mut self, _key: String) -> wasmtime::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn set(
        &mut self,
        _key: String,
        _value: Vec<u8>,
        _ttl: Option<u32>,
    ) -> wasmtime::Result<Result<(), String>> {
        Ok(Ok(()))
    }

    fn add(&mut self, _key: String, delta: i64, _ttl: Option<u32>) -> wasmtime::Result<Result<i64, String>> {
        Ok(Ok(delta))
    }
}

impl types::Host for Even {}

impl dispatch::Host for Even {}

fn as_guest_sees_it(request: &RouteRequest) -> types::Request {
    let role = |role| match role {
        Role::System => types::Role::System,
        Role::User => types::Role::User,
        Role::Assistant => types::Role::Assistant,
        Role::Tool => types::Role::Tool,
    };
    let message = |message: &Message| types::Message {
        role: role(message.role),
        content: message.content.clone(),
        tool_calls: Vec::new(),
        tool_call_id: None,
    };
    types::Request {
        id: request.id.clone(),
        model: request.model.clone(),
        messages: request.messages.iter().map(message).collect(),
        tools: Vec::new(),
        sampling: types::Sampling {
            temperature: None,
            top_p: None,
            max_tokens: None,
            seed: None,
            stop: Vec::new(),
        },
        headers: Vec::new(),
    }
}
