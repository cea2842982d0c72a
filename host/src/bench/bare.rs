//! A policy on wasmtime alone: the yardstick for what the policy host adds.

use forkpoint_engine::{Message, Role};
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, Linker, LinkerInstance, Resource, ResourceType};
use wasmtime::{Engine, Store};

use super::error::BenchError;
use crate::policy::{RouteRequest, pooled_config};

mod bindings {
    //! The contract, as wasmtime's own example of embedding a world binds it.

    wasmtime::component::bindgen!({
        path: "../wit",
        world: "policy",
        imports: { default: async | trappable },
        exports: { default: async },
    });
}

use bindings::forkpoint::policy::engine::Session;
use bindings::forkpoint::policy::types;

/// A component, compiled and linked as the policy host does it, and called with nothing around it: no bounds on time,
/// memory or calls, no journal, no checks of the plan.
pub(super) struct Bare {
    engine: Engine,
    pre: bindings::PolicyPre<()>,
    request: types::Request,
}

impl Bare {
    /// # Errors
    /// When wasmtime takes the component for none.
    pub(super) fn new(
        bytes: &[u8],
        concurrency: u32,
        memory: usize,
        request: &RouteRequest,
    ) -> Result<Self, BenchError> {
        Self::build(bytes, concurrency, memory, request)
            .map_err(|error| BenchError::Unfit(format!("bare wasmtime: {error:#}")))
    }

    fn build(
        bytes: &[u8],
        concurrency: u32,
        memory: usize,
        request: &RouteRequest,
    ) -> wasmtime::Result<Self> {
        let engine = Engine::new(&pooled_config(concurrency, memory))?;
        let component = Component::from_binary(&engine, bytes)?;
        let mut linker = Linker::new(&engine);
        for (name, import) in component.component_type().imports(&engine) {
            if let ComponentItem::ComponentInstance(interface) = import.ty {
                let mut instance = linker.instance(name)?;
                for (item, export) in interface.exports(&engine) {
                    define(&mut instance, item, &export.ty)?;
                }
            }
        }
        let pre = bindings::PolicyPre::new(linker.instantiate_pre(&component)?)?;
        Ok(Self { engine, pre, request: as_guest_sees_it(request) })
    }

    /// A fresh instance, one call, and the end of both. Returns the plan's reason.
    pub(super) async fn call(&self) -> wasmtime::Result<String> {
        let mut store = Store::new(&self.engine, ());
        // Nothing advances the epoch; the code that looks at it is the same.
        store.set_epoch_deadline(1);
        let guest = self.pre.instantiate_async(&mut store).await?;
        let routing = guest.call_route(&mut store, &self.request, Resource::new_own(0)).await?;
        let routing = routing.map_err(wasmtime::Error::msg)?;
        Ok(routing.reason)
    }
}

/// Imports that a policy which asks nothing does not call.
fn define(instance: &mut LinkerInstance<'_, ()>, item: &str, ty: &ComponentItem) -> wasmtime::Result<()> {
    match ty {
        ComponentItem::ComponentFunc(_) => {
            let name = item.to_owned();
            instance.func_new(item, move |_, _, _, _| Err(wasmtime::Error::msg(format!("{name} was called"))))
        }
        ComponentItem::Resource(_) => instance.resource(item, ResourceType::host::<Session>(), |_, _| Ok(())),
        _ => Ok(()),
    }
}

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
