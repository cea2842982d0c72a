//! From a file to a component that is ready to be instantiated, or to an error that tells its author what to do.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use bytes::Bytes;
use serde::Serialize;
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, Linker, LinkerInstance, ResourceType};

use super::cache::Cache;
use super::contract::{CONTRACT_VERSIONS, Pre, Version};
use super::guest::{Halt, State};
use super::manifest::Manifest;
use super::registry::VERSION_DIGITS;
use crate::guest_tools::wasm_layer;
use crate::models::hex;

/// The package whose interfaces a policy imports.
const PACKAGE: &str = "forkpoint:policy/";

/// Why a file is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadCode {
    /// It could not be read.
    Unreadable,
    /// It has no bytes.
    Empty,
    /// It is larger than the server accepts.
    TooLarge,
    /// It ends in the middle, as a file does that is still being written.
    Truncated,
    /// It is not valid WebAssembly.
    Malformed,
    /// It is a module, not a component.
    CoreModule,
    /// It does not implement the contract, or another version of it.
    WrongWorld,
    /// It imports what is not granted.
    DeniedImport,
    /// Its manifest says what cannot be.
    Manifest,
    /// It is not the component that its manifest pins.
    Pin,
    /// It is not signed as the operator asks, or the signature is not good.
    Signature,
    /// This version was rolled back.
    Withdrawn,
    /// It could not be compiled.
    Compile,
    /// The canary call trapped or met a limit.
    Canary,
}

impl LoadCode {
    /// The word for status and logs.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Empty => "empty",
            Self::TooLarge => "too-large",
            Self::Truncated => "truncated",
            Self::Malformed => "malformed",
            Self::CoreModule => "core-module",
            Self::WrongWorld => "wrong-world",
            Self::DeniedImport => "denied-import",
            Self::Manifest => "manifest",
            Self::Pin => "pin",
            Self::Signature => "signature",
            Self::Withdrawn => "withdrawn",
            Self::Compile => "compile",
            Self::Canary => "canary",
        }
    }
}

/// Why a file is not served, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", .code.code())]
pub struct LoadError {
    /// The kind.
    pub code: LoadCode,
    /// One sentence for the author of the policy.
    pub message: String,
}

impl LoadError {
    pub(super) fn new(code: LoadCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// A component's bytes, their SHA-256 in hexadecimal digits, and what its manifest says.
pub(super) struct Source {
    pub(super) bytes: Bytes,
    pub(super) hash: String,
    pub(super) manifest: Option<Manifest>,
}

impl Source {
    /// The first digits of the hash.
    pub(super) fn version(&self) -> &str {
        &self.hash[..VERSION_DIGITS]
    }

    /// Whether this is the component that its manifest pins, if it pins one.
    pub(super) fn check_pin(&self) -> Result<(), LoadError> {
        check_pin(&self.hash, self.manifest.as_ref())
    }
}

/// Whether a component of this hash is the one that a manifest pins, if it pins one.
pub(super) fn check_pin(hash: &str, manifest: Option<&Manifest>) -> Result<(), LoadError> {
    match manifest.and_then(|manifest| manifest.sha256.as_ref()) {
        Some(pin) if *pin != hash => {
            let message = format!("the manifest pins sha256 {pin}, the file has {hash}");
            Err(LoadError::new(LoadCode::Pin, message))
        }
        _ => Ok(()),
    }
}

/// Reads a file whole, in one go, but not more than `most` bytes.
pub(super) fn read(path: &Path, most: u64) -> Result<Source, LoadError> {
    let unreadable = |error: std::io::Error| LoadError::new(LoadCode::Unreadable, error.to_string());
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(unreadable)?;
    source(bytes.into(), most)
}

/// Takes a component of at most `most` bytes.
pub(super) fn source(bytes: Bytes, most: u64) -> Result<Source, LoadError> {
    if bytes.is_empty() {
        return Err(LoadError::new(LoadCode::Empty, "the file has no bytes"));
    }
    if bytes.len() as u64 > most {
        let message = format!("the file has more than {most} bytes, the server's limit for a policy");
        return Err(LoadError::new(LoadCode::TooLarge, message));
    }
    let hash = hex(&Sha256::digest(&bytes));
    Ok(Source { bytes, hash, manifest: None })
}

/// A component that fits the contract, compiled and linked.
pub(super) struct Linked {
    pub(super) pre: Pre,
    /// The version of the contract that it was built against.
    pub(super) contract: String,
    /// Functions that it imports.
    pub(super) imports: Vec<String>,
}

/// Validates, compiles (or finds compiled) and links a component to the contract's imports. Takes seconds for a
/// large one.
pub(super) fn link(
    mut linker: Linker<State>,
    cache: Option<&Cache>,
    source: &Source,
) -> Result<Linked, LoadError> {
    check_header(&source.bytes)?;
    let engine = linker.engine().clone();
    let component = match cache.and_then(|cache| cache.get(&engine, &source.hash)) {
        Some(component) => component,
        None => {
            let component = Component::from_binary(&engine, &source.bytes).map_err(compile_error)?;
            if let Some(Err(error)) = cache.map(|cache| cache.put(&engine, &source.hash, &component)) {
                tracing::warn!(target: "policy", %error, "compiled code is not kept");
            }
            component
        }
    };
    let version = check_world(&engine, &component)?;
    deny_wasi(&mut linker, &component).map_err(|error| misfit(version, &error))?;
    let pre = linker.instantiate_pre(&component).and_then(|pre| Pre::new(pre, version));
    let pre = pre.map_err(|error| misfit(version, &error))?;
    Ok(Linked { pre, contract: version.name().to_owned(), imports: imports(&engine, &component) })
}

fn imports(engine: &Engine, component: &Component) -> Vec<String> {
    let mut functions = Vec::new();
    for (name, import) in component.component_type().imports(engine) {
        if let ComponentItem::ComponentInstance(interface) = import.ty {
            let of = interface
                .exports(engine)
                .filter(|(_, item)| matches!(item.ty, ComponentItem::ComponentFunc(_)));
            functions.extend(of.map(|(function, _)| format!("{name}#{function}")));
        }
    }
    functions
}

/// What can be said about a file from its bytes alone.
fn check_header(bytes: &[u8]) -> Result<(), LoadError> {
    const MAGIC: &[u8] = b"\0asm";
    let error = |code, message: &str| Err(LoadError::new(code, message));
    match wasm_layer(bytes) {
        Some(0) => error(
            LoadCode::CoreModule,
            "this is a core module; `forkpoint policy componentize IN.wasm OUT.wasm` makes it a component",
        ),
        Some(1) if ends_inside(bytes) => error(
            LoadCode::Truncated,
            "the file ends in the middle of a section: was it still being written?",
        ),
        Some(1) => Ok(()),
        Some(layer) => error(LoadCode::Malformed, &format!("WebAssembly of an unknown layer, {layer}")),
        None if bytes.starts_with(MAGIC) || MAGIC.starts_with(bytes) => {
            error(LoadCode::Truncated, "the file ends inside its header: was it still being written?")
        }
        None if bytes.trim_ascii_start().starts_with(b"(") => error(
            LoadCode::Malformed,
            "this is WebAssembly text; `forkpoint policy componentize` makes a component of a module in text",
        ),
        None => error(LoadCode::Malformed, "this is not WebAssembly: it does not begin with \\0asm"),
    }
}

/// Whether the last section says that it is longer than the file. A section is an identifier of one byte, a length
/// in LEB128 and so many bytes (component model, Binary.md).
fn ends_inside(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(8..).unwrap_or_default();
    while let Some((_, after)) = rest.split_first() {
        let mut length: u64 = 0;
        let mut digits = 0;
        loop {
            let Some(&byte) = after.get(digits) else { return true };
            length |= u64::from(byte & 0x7f) << (7 * digits);
            digits += 1;
            // A length of more than five bytes is malformed; the validator says so.
            if byte & 0x80 == 0 || digits == 5 {
                break;
            }
        }
        let Some(next) = usize::try_from(length).ok().and_then(|length| after[digits..].get(length..)) else {
            return true;
        };
        rest = next;
    }
    false
}

fn compile_error(error: wasmtime::Error) -> LoadError {
    let code = if error.chain().any(|cause| cause.is::<wasmparser::BinaryReaderError>()) {
        LoadCode::Malformed
    } else {
        LoadCode::Compile
    };
    LoadError::new(code, format!("{error:#}"))
}

/// The component has the right shape, but not the right types.
fn misfit(version: Version, error: &wasmtime::Error) -> LoadError {
    let version = version.name();
    let message =
        format!("does not fit {PACKAGE}policy@{version}: {error:#}; build it against this version's WIT");
    LoadError::new(LoadCode::WrongWorld, message)
}

/// Whether every import is one that is served or denied by name, and `route` is exported. Returns the version of
/// the contract that serves the component: that of its imports, which is one for all of them.
fn check_world(engine: &Engine, component: &Component) -> Result<Version, LoadError> {
    let world = component.component_type();
    let wrong = |message: String| LoadError::new(LoadCode::WrongWorld, message);
    let served = CONTRACT_VERSIONS.join(" and ");
    let mut first: Option<(Version, String)> = None;
    for (name, import) in world.imports(engine) {
        if let Some(interface) = name.strip_prefix(PACKAGE) {
            let version = interface.split_once('@').map_or("", |(_, version)| version);
            let version = Version::serving(version).ok_or_else(|| {
                wrong(format!("imports {name}; the versions of the contract served here are {served}"))
            })?;
            let (before, other) = first.get_or_insert_with(|| (version, name.to_owned()));
            if *before != version {
                let message = format!("imports {other} and {name}: a policy is built against one version");
                return Err(wrong(message));
            }
        } else if !name.starts_with("wasi:")
            // Names that the world gives to types of its interfaces.
            && !matches!(import.ty, ComponentItem::Type(_) | ComponentItem::Resource(_))
        {
            let message = format!("imports {name}, which no policy is granted");
            return Err(LoadError::new(LoadCode::DeniedImport, message));
        }
    }
    if world.get_export(engine, "route").is_none() {
        let exports: Vec<_> = world.exports(engine).map(|(name, _)| name).take(8).collect();
        let exports = if exports.is_empty() { "nothing".to_owned() } else { exports.join(", ") };
        return Err(wrong(format!("exports {exports}, not the function `route` of {PACKAGE}policy")));
    }
    // The session that `route` takes is a type of an interface that the component must import.
    let version = first.map(|(version, _)| version);
    version.ok_or_else(|| {
        wrong(format!(
            "imports no interface of {PACKAGE}policy, so `route` cannot be its function; the versions of the \
             contract served here are {served}"
        ))
    })
}

/// Links each WASI import to a function that ends the call and says its name. Components carry such imports for
/// what their language's runtime might do, and most never call them.
fn deny_wasi(linker: &mut Linker<State>, component: &Component) -> wasmtime::Result<()> {
    let engine = linker.engine().clone();
    for (name, import) in component.component_type().imports(&engine) {
        if name.starts_with("wasi:")
            && let ComponentItem::ComponentInstance(interface) = import.ty
        {
            let mut instance = linker.instance(name)?;
            for (item, export) in interface.exports(&engine) {
                deny(&mut instance, name, item, &export.ty)?;
            }
        }
    }
    Ok(())
}

fn deny(
    instance: &mut LinkerInstance<'_, State>,
    interface: &str,
    item: &str,
    ty: &ComponentItem,
) -> wasmtime::Result<()> {
    match ty {
        ComponentItem::ComponentFunc(_) => {
            let name = format!("{interface}#{item}");
            instance.func_new(item, move |_, _, _, _| Err(Halt::Denied(name.clone()).into()))
        }
        ComponentItem::Resource(_) => instance.resource(item, ResourceType::host::<()>(), |_, _| Ok(())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A component header, then a custom section of `length` that says it is `claimed` bytes long.
    fn component(claimed: u8, length: usize) -> Vec<u8> {
        let mut bytes = b"\0asm\x0d\0\x01\0\0".to_vec();
        bytes.push(claimed);
        bytes.extend(vec![0; length]);
        bytes
    }

    #[test]
    fn a_file_is_judged_by_its_first_bytes() {
        let cases: [(&[u8], LoadCode); 9] = [
            (b"\0as", LoadCode::Truncated),
            (b"\0asm\x0d\0\x01", LoadCode::Truncated),
            (b"\0asm\x01\0\0\0", LoadCode::CoreModule),
            (b"\0asm\x0d\0\x07\0", LoadCode::Malformed),
            (b"\x7fELF", LoadCode::Malformed),
            (b"  (component)", LoadCode::Malformed),
            (b"x", LoadCode::Malformed),
            (&component(5, 4), LoadCode::Truncated),
            (&component(0x85, 0), LoadCode::Truncated),
        ];
        for (bytes, code) in cases {
            assert_eq!(check_header(bytes).unwrap_err().code, code, "{bytes:?}");
        }
        assert_eq!(check_header(&component(4, 4)), Ok(()));
        assert_eq!(check_header(b"\0asm\x0d\0\x01\0"), Ok(()));
        let text = check_header(b"(module)").unwrap_err().message;
        assert!(text.contains("forkpoint policy componentize"), "{text}");
    }

    #[test]
    fn reading_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.wasm");
        let code = |most| read(&path, most).err().map(|error| error.code);
        assert_eq!(code(10), Some(LoadCode::Unreadable));
        std::fs::write(&path, b"").unwrap();
        assert_eq!(code(10), Some(LoadCode::Empty));
        std::fs::write(&path, b"12345678901").unwrap();
        assert_eq!(code(10), Some(LoadCode::TooLarge));
        assert_eq!(code(11), None);
        let source = read(&path, 11).unwrap();
        assert!(source.hash.starts_with("254aa248acb4"), "{}", source.hash);
    }
}
