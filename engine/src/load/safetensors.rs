//! Hugging Face's folder of `*.safetensors`, one file or sharded.
//!
//! The header is read by the `safetensors` crate, which bounds it and proves
//! that tensors cover the file without overlap. Names are translated to GGUF's,
//! so that the rest of the engine knows one set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forkpoint_kernels::{Format, MappedFile};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::Tensor;
use super::error::{At, LoadError};

/// The index of a sharded checkpoint.
const INDEX: &str = "model.safetensors.index.json";
/// The file of one that is not.
const SINGLE: &str = "model.safetensors";
/// The most that a JSON file may hold; the largest real index has some 20 MB.
const MAX_JSON: u64 = 256 << 20;

/// Reads a JSON file; none where there is none.
///
/// # Errors
/// When it cannot be read, or is not JSON.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, LoadError> {
    let at = At(path);
    let Some(bytes) = read_small(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| at.invalid("the file", "JSON", error))
}

/// Reads a file that is not weights; none where there is none.
///
/// # Errors
/// When it cannot be read, or is larger than any such file.
pub(crate) fn read_small(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let at = At(path);
    let length = match std::fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(at.io(error)),
    };
    if length > MAX_JSON {
        return Err(at.invalid("the file", format_args!("at most {MAX_JSON} bytes long"), length));
    }
    std::fs::read(path).map(Some).map_err(|error| at.io(error))
}

/// Maps the shards of a folder and lists their tensors under GGUF's names.
///
/// # Errors
/// When a shard is missing or damaged, two shards hold the same tensor, or a
/// tensor has a name or a type that is not known here.
pub(crate) fn open(folder: &Path) -> Result<(Vec<MappedFile>, BTreeMap<String, Tensor>), LoadError> {
    let (paths, homes) = shards(folder)?;
    let mut files = Vec::with_capacity(paths.len());
    let mut tensors = BTreeMap::new();
    for (number, path) in paths.iter().enumerate() {
        let at = At(path);
        let file = MappedFile::open(path).map_err(|error| at.io(error))?;
        let header = SafeTensors::deserialize(&file)
            .map_err(|error| at.invalid("the file", "whole and in safetensors format", error))?;
        for (name, view) in header.iter() {
            if homes.as_ref().is_some_and(|homes| homes.get(name).is_none_or(|home| home != path)) {
                return Err(at.invalid("tensor", format_args!("in the file that {INDEX} says"), name));
            }
            if name.ends_with(".rotary_emb.inv_freq") {
                // Old checkpoints store what follows from rope_theta.
                continue;
            }
            let canonical =
                canonical(name).ok_or_else(|| at.unsupported("tensor", name, "those of the Llama shape"))?;
            let format = match view.dtype() {
                Dtype::F32 => Format::F32,
                Dtype::F16 => Format::F16,
                Dtype::BF16 => Format::BF16,
                other => {
                    let what = format!("the type of tensor {name},");
                    return Err(at.unsupported(what, format_args!("{other:?}"), "F32, F16, BF16"));
                }
            };
            // The view is a slice of the file; its place there is what outlives the header.
            let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
            let range = start..start + view.data().len();
            let tensor = Tensor { format, shape: view.shape().to_vec(), file: number, range };
            if tensors.insert(canonical, tensor).is_some() {
                return Err(at.invalid("tensor", "in one shard only", format_args!("{name} in two")));
            }
        }
        files.push(file);
    }
    if let Some(homes) = homes
        && let Some(name) =
            homes.keys().find(|name| canonical(name).is_some_and(|name| !tensors.contains_key(&name)))
    {
        return Err(At(&homes[name]).missing(format_args!("tensor {name}")));
    }
    Ok((files, tensors))
}

/// Which file each tensor is in, by its Hugging Face name.
type Homes = BTreeMap<String, PathBuf>;

/// The files to read, and where the index says that tensors are.
fn shards(folder: &Path) -> Result<(Vec<PathBuf>, Option<Homes>), LoadError> {
    let path = folder.join(INDEX);
    let at = At(&path);
    let Some(index) = read_json(&path)? else {
        let single = folder.join(SINGLE);
        if single.is_file() {
            return Ok((vec![single], None));
        }
        return Err(At(folder).missing(format_args!("{SINGLE} or {INDEX}")));
    };
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| at.missing("weight_map"))?;
    let mut homes = Homes::new();
    let mut paths = Vec::new();
    for (name, file) in map {
        let file = file.as_str().unwrap_or_default();
        // A plain name: an index must not reach out of its folder.
        if file.contains(['/', '\\']) || !file.ends_with(".safetensors") {
            return Err(at.invalid(format_args!("the file of {name}"), "a *.safetensors beside it", file));
        }
        let path = folder.join(file);
        if !paths.contains(&path) {
            paths.push(path.clone());
        }
        homes.insert(name.clone(), path);
    }
    paths.sort();
    Ok((paths, Some(homes)))
}

/// GGUF's name for a tensor of Transformers' Llama shape.
fn canonical(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    // As it is written everywhere else: no sign, no leading zero.
    let layer = layer.parse::<u32>().ok().filter(|number| number.to_string() == layer)?;
    let (module, kind) = rest.rsplit_once('.')?;
    if !matches!(kind, "weight" | "bias") {
        return None;
    }
    let module = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{module}.{kind}"))
}
