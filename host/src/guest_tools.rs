//! Tools for guest authors: a core module becomes a component, and the contract becomes bindings for C and Go. What
//! `forkpoint policy build`, `componentize` and `bindgen c` call, so that an author needs no other tool than a compiler
//! for wasm32.

mod room;

use std::fs;
use std::path::{Path, PathBuf};

use wasi_preview1_component_adapter_provider as adapter;
use wit_component::{ComponentEncoder, StringEncoding};
use wit_parser::{Resolve, WorldId};

/// The contract that policies and helpers are built against where nobody names another, as WIT text.
pub const CONTRACT: &str = include_str!("../../wit/policy.wit");

/// Every contract that is served, by its version, the newest first.
pub const CONTRACTS: [(&str, &str); 2] =
    [("0.2.0-trial", include_str!("../../wit/trial/policy.wit")), ("0.1.0", CONTRACT)];

/// Stands in for WASI preview 1, and gives nothing.
const NO_WASI: &str = include_str!("guest_tools/no_wasi.wat");

/// The world that a policy implements.
pub const WORLD: &str = "policy";

/// What errors call a contract that comes as text.
const TEXT: &str = "policy.wit";

/// Where a contract is read from.
#[derive(Debug, Clone, Copy)]
pub enum Wit<'a> {
    /// A folder or a file.
    Path(&'a Path),
    /// Its text.
    Text(&'a str),
}

impl Wit<'_> {
    /// The one of [`CONTRACTS`] that has this version.
    #[must_use]
    pub fn of(version: &str) -> Option<Self> {
        CONTRACTS.iter().find(|(one, _)| *one == version).map(|(_, text)| Self::Text(text))
    }
}

/// Why a guest tool did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestToolError {
    /// The input is neither WebAssembly nor its text format.
    #[error("not a WebAssembly module: {0:#}")]
    NotWasm(anyhow::Error),
    /// There is nothing to do.
    #[error("this is a component already")]
    AlreadyComponent,
    /// The WIT files do not parse, or have no world to bind.
    #[error("cannot read a world from {path}: {cause:#}")]
    Wit {
        /// Where the WIT was looked for.
        path: PathBuf,
        /// What is wrong with it.
        cause: anyhow::Error,
    },
    /// The module does not fit the world that it claims to implement.
    #[error("the module does not make a component: {cause:#}{hint}")]
    Encode {
        /// What does not fit.
        cause: anyhow::Error,
        /// What to try, or nothing.
        hint: &'static str,
    },
    /// The generator refused the world.
    #[error("cannot generate bindings: {0:#}")]
    Bindgen(anyhow::Error),
    /// A generated file could not be written.
    #[error("cannot write {path}: {cause}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
}

/// Makes a component of a core module (binary or text).
///
/// A module that wit-bindgen made carries its world in custom sections. One that does not gets the world
/// `policy` of `wit`; its exports then follow the canonical ABI under their WIT names. `adapt` links the adapter from
/// WASI preview 1, which modules for `wasm32-wasip1` import.
///
/// # Errors
/// When the input is not a module or its imports and exports do not fit the world.
pub fn componentize(core: &[u8], adapt: bool, wit: Wit<'_>) -> Result<Vec<u8>, GuestToolError> {
    let adapter = adapt.then_some(adapter::WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER);
    let fitted = with_world(core, wit)?;
    encode(&fitted, adapter).map_err(|cause| {
        let wants_adapter =
            !adapt && format!("{cause:#}").contains(adapter::WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME);
        let hint = if wants_adapter { "; a module for WASI preview 1 needs --adapt" } else { "" };
        GuestToolError::Encode { cause, hint }
    })
}

/// Makes a component of a core module for `wasm32-wasip1` that needs nothing of WASI from its host: its language's
/// runtime asks for the time, random bytes and a standard output, and gets stand-ins. `wit` is as for [`componentize`].
///
/// # Errors
/// When the input is not a module or its imports and exports do not fit the world.
pub fn componentize_without_wasi(core: &[u8], wit: Wit<'_>) -> Result<Vec<u8>, GuestToolError> {
    let stand_in = wat::parse_str(NO_WASI).map_err(|cause| GuestToolError::NotWasm(cause.into()))?;
    encode(&with_world(core, wit)?, Some(&stand_in))
        .map_err(|cause| GuestToolError::Encode { cause, hint: "" })
}

/// The module, in binary, with its world in a custom section.
fn with_world(core: &[u8], wit: Wit<'_>) -> Result<Vec<u8>, GuestToolError> {
    let mut module =
        wat::parse_bytes(core).map_err(|cause| GuestToolError::NotWasm(cause.into()))?.into_owned();
    if wasm_layer(&module) == Some(1) {
        return Err(GuestToolError::AlreadyComponent);
    }
    let (stripped, _) = wit_component::metadata::decode(&module).map_err(GuestToolError::NotWasm)?;
    if stripped.is_none() {
        let (resolve, world) = load_world(wit)?;
        wit_component::embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)
            .map_err(|cause| GuestToolError::Encode { cause, hint: "" })?;
    }
    Ok(module)
}

fn encode(module: &[u8], preview1: Option<&[u8]>) -> anyhow::Result<Vec<u8>> {
    // What cannot be read is for the encoder to refuse.
    let roomy = room::with_room(module).unwrap_or_else(|error| {
        tracing::debug!(%error, "a module gets no room");
        None
    });
    let module = roomy.as_deref().unwrap_or(module);
    let mut encoder = ComponentEncoder::default().validate(true).debug_names(false).module(module)?;
    if let Some(preview1) = preview1 {
        encoder = encoder.adapter(adapter::WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, preview1)?;
    }
    encoder.encode()
}

/// Writes C bindings of the world of `wit` into `out`: `policy.h`, `policy.c` and an object that
/// carries the world and is linked in. Returns what was written.
///
/// # Errors
/// When the WIT does not parse or the files cannot be written.
pub fn bindgen_c(wit: Wit<'_>, out: &Path) -> Result<Vec<PathBuf>, GuestToolError> {
    generate(wit_bindgen_c::Opts::default().build(), wit, out, <[u8]>::to_vec)
}

/// Writes Go bindings of the world of `wit` into the folder `bindings` of the Go module that
/// lies at `out` and is called `module`. They import what that module must have: `types`, `runtime`, and
/// `bindings/export_wit_world` with the function `Route`; wit/go has them. Returns what was written.
///
/// # Errors
/// When the WIT does not parse or the files cannot be written.
pub fn bindgen_go(wit: Wit<'_>, out: &Path, module: &str) -> Result<Vec<PathBuf>, GuestToolError> {
    let options = wit_bindgen_go::Opts {
        // What is generated is not read, and formatting it would need gofmt.
        format: wit_bindgen_go::Format::False,
        pkg_name: Some(format!("{module}/bindings")),
        ..wit_bindgen_go::Opts::default()
    };
    // The generator's own runtime would have to be fetched from elsewhere.
    let adapt = |text: &[u8]| {
        let text = String::from_utf8_lossy(text);
        text.replace("go.bytecodealliance.org/pkg/wit/", &format!("{module}/")).into_bytes()
    };
    generate(options.build(), wit, &out.join("bindings"), adapt)
}

fn generate(
    mut generator: Box<dyn wit_bindgen_core::WorldGenerator>,
    wit: Wit<'_>,
    out: &Path,
    adapt: impl Fn(&[u8]) -> Vec<u8>,
) -> Result<Vec<PathBuf>, GuestToolError> {
    let (mut resolve, world) = load_world(wit)?;
    let mut files = wit_bindgen_core::Files::default();
    generator.generate(&mut resolve, world, &mut files).map_err(GuestToolError::Bindgen)?;
    let mut written = Vec::new();
    for (name, content) in files.iter() {
        let path = out.join(name);
        let folder = path.parent().unwrap_or(out);
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, adapt(content)))
            .map_err(|cause| GuestToolError::Write { path: path.clone(), cause })?;
        written.push(path);
    }
    Ok(written)
}

/// The world `policy` of a WIT package, or its only world.
fn load_world(wit: Wit<'_>) -> Result<(Resolve, WorldId), GuestToolError> {
    let load = || {
        let mut resolve = Resolve::default();
        let package = match wit {
            Wit::Path(path) => resolve.push_path(path)?.0,
            Wit::Text(text) => resolve.push_str(Path::new(TEXT), text)?,
        };
        let named = resolve.packages[package].worlds.contains_key(WORLD).then_some(WORLD);
        let world = resolve.select_world(&[package], named)?;
        anyhow::Ok((resolve, world))
    };
    load().map_err(|cause| {
        let path = match wit {
            Wit::Path(path) => path,
            Wit::Text(_) => Path::new(TEXT),
        };
        GuestToolError::Wit { path: path.to_owned(), cause }
    })
}

/// The layer in a WebAssembly header: 0 for a core module, 1 for a component; none when it is not one.
pub(crate) fn wasm_layer(bytes: &[u8]) -> Option<u16> {
    let header = bytes.get(..8)?;
    header.starts_with(b"\0asm").then(|| u16::from_le_bytes([header[6], header[7]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A world of one function, so that the canonical ABI fits on one screen.
    const ADDER: &str = "package test:adder; world adder { export add: func(a: u32, b: u32) -> u32; }";
    const ADD: &str = r#"(module (func (export "add") (param i32 i32) (result i32)
        local.get 0 local.get 1 i32.add))"#;

    #[test]
    fn a_text_module_becomes_a_component() {
        let component = componentize(ADD.as_bytes(), false, Wit::Text(ADDER)).unwrap();
        assert_eq!(wasm_layer(&component), Some(1));
        let again = componentize(&component, false, Wit::Text(CONTRACT)).unwrap_err();
        assert!(matches!(again, GuestToolError::AlreadyComponent), "{again}");
    }

    #[test]
    fn a_module_that_does_not_fit_the_contract_is_told_what_is_missing() {
        let error = componentize(ADD.as_bytes(), false, Wit::Text(CONTRACT)).unwrap_err().to_string();
        assert!(error.contains("route"), "{error}");
    }

    #[test]
    fn a_contract_is_read_from_a_folder_or_built_in() {
        let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wit");
        for (folder, version) in [(wit.clone(), "0.1.0"), (wit.join("trial"), "0.2.0-trial")] {
            for wit in [Wit::Path(&folder), Wit::of(version).unwrap()] {
                let (resolve, world) = load_world(wit).unwrap();
                let package = &resolve.packages[resolve.worlds[world].package.unwrap()].name;
                assert_eq!(package.to_string(), format!("forkpoint:policy@{version}"));
            }
        }
        assert!(Wit::of("0.2.0").is_none());
    }

    #[test]
    fn a_preview_1_module_is_told_to_adapt() {
        let core = r#"(module (import "wasi_snapshot_preview1" "sched_yield" (func (result i32))))"#;
        let error = componentize(core.as_bytes(), false, Wit::Text(CONTRACT)).unwrap_err().to_string();
        assert!(error.contains("--adapt"), "{error}");
    }

    #[test]
    fn a_module_that_grows_gets_room_with_and_without_wasi() {
        let core = r#"(module
            (import "wasi_snapshot_preview1" "sched_yield" (func $yield (result i32)))
            (global (mut i32) (i32.const 0))
            (memory (export "memory") 3)
            (func (export "add") (param i32 i32) (result i32)
                (i32.add (memory.grow (local.get 0)) (call $yield))))"#;
        for component in [
            componentize(core.as_bytes(), true, Wit::Text(ADDER)).unwrap(),
            componentize_without_wasi(core.as_bytes(), Wit::Text(ADDER)).unwrap(),
        ] {
            let memories = wasmparser::Parser::new(0).parse_all(&component).filter_map(|payload| {
                let wasmparser::Payload::MemorySection(section) = payload.unwrap() else { return None };
                Some(section.into_iter().next().unwrap().unwrap().initial)
            });
            assert!(memories.into_iter().any(|pages| pages == 19));
        }
    }

    #[test]
    fn a_preview_1_module_can_do_without_its_host() {
        let core = r#"(module
            (import "wasi_snapshot_preview1" "clock_time_get" (func $time (param i32 i64 i32) (result i32)))
            (import "wasi_snapshot_preview1" "path_unlink_file" (func $unlink (param i32 i32 i32) (result i32)))
            (memory (export "memory") 1)
            (func (export "add") (param i32 i32) (result i32)
                (i32.add (call $unlink (i32.const 3) (i32.const 0) (i32.const 0))
                    (call $time (i32.const 0) (i64.const 0) (i32.const 16)))))"#;
        let alone = componentize_without_wasi(core.as_bytes(), Wit::Text(ADDER)).unwrap();
        assert_eq!(imports(&alone), Vec::<String>::new());
        let adapted = componentize(core.as_bytes(), true, Wit::Text(ADDER)).unwrap();
        assert!(
            imports(&adapted).iter().any(|name| name.starts_with("wasi:clocks/")),
            "{:?}",
            imports(&adapted)
        );
    }

    /// What a component imports.
    fn imports(component: &[u8]) -> Vec<String> {
        let decoded = wit_component::decode(component).unwrap();
        let wit_component::DecodedWasm::Component(resolve, world) = decoded else {
            panic!("not a component")
        };
        let keys = resolve.worlds[world].imports.keys();
        keys.map(|key| resolve.name_world_key(key)).collect()
    }

    #[test]
    fn what_is_not_wasm_is_refused() {
        let error = componentize(b"\x7fELF", false, Wit::Text(CONTRACT)).unwrap_err();
        assert!(matches!(error, GuestToolError::NotWasm(_)), "{error}");
    }

    #[test]
    fn c_bindings_declare_the_export() {
        for (version, text) in CONTRACTS {
            let dir = tempfile::tempdir().unwrap();
            let written = bindgen_c(Wit::Text(text), &dir.path().join("c")).unwrap();
            let header = written.iter().find(|path| path.extension().is_some_and(|e| e == "h")).unwrap();
            let header = fs::read_to_string(header).unwrap();
            assert!(header.contains("exports_policy_route"), "{written:?}");
            assert_eq!(header.contains("retry_after"), version != "0.1.0", "{version}");
            assert!(written.iter().any(|path| path.extension().is_some_and(|e| e == "o")), "{written:?}");
        }
    }

    #[test]
    fn go_bindings_declare_the_export_and_import_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let written = bindgen_go(Wit::Text(CONTRACT), dir.path(), "example.org/gate").unwrap();
        let texts: Vec<String> = written.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        assert!(texts.iter().any(|text| text.contains("//go:wasmexport route")), "{written:?}");
        assert!(texts.iter().any(|text| text.contains("\"example.org/gate/bindings/")), "{written:?}");
        assert!(texts.iter().any(|text| text.contains("\"example.org/gate/types\"")), "{written:?}");
        assert!(written[0].starts_with(dir.path().join("bindings")), "{written:?}");
    }
}
