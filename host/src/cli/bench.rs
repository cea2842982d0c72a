//! `forkpoint bench`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::serve::ModelArgs;
use super::{LogFormat, on_runtime, start_log};
use crate::bench::{self, Against, Measure, Plan};
use crate::config::{Config, StateConfig};

#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What to measure [default: all].
    #[arg(long, value_name = "MEASURE", value_delimiter = ',')]
    only: Vec<Measure>,
    /// A running peer: llama=URL for llama.cpp's llama-server, vllm=URL for vLLM; with a label where there are
    /// several, llama:q4_0=URL. May be repeated.
    #[arg(long, value_name = "PEER=URL")]
    against: Vec<Against>,
    /// How often each side runs.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Tokens of the states that questions are asked about.
    #[arg(long, value_name = "TOKENS", default_value = "4100", value_parser = clap::value_parser!(u32).range(64..))]
    state_tokens: u32,
    /// Tokens of the cold prompts.
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "512,2048,4096,8192",
        value_parser = clap::value_parser!(u32).range(16..)
    )]
    prompts: Vec<u32>,
    /// Tokens before the replies whose speed is measured.
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "128,2048,8192",
        value_parser = clap::value_parser!(u32).range(16..)
    )]
    depths: Vec<u32>,
    /// How many questions a call asks.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,4,16",
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    questions: Vec<u16>,
    /// How many clients ask at once.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,8,32",
        value_parser = clap::value_parser!(u16).range(1..=256)
    )]
    clients: Vec<u16>,
    /// Small sizes and one repeat, to see that it works: its figures say nothing.
    #[arg(long)]
    quick: bool,
    /// Where to write the results as JSON; - writes standard output, in place of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl BenchArgs {
    pub(super) fn run(self) -> Result<()> {
        start_log(LogFormat::Human, "warn")?;
        let kv_memory_given = self.model.kv_memory.is_some();
        let plan = Plan {
            // It leaves nothing behind, and a server of these plugins may run beside it.
            config: Config {
                state: StateConfig { dir: Some(StateConfig::MEMORY.into()) },
                ..self.model.into_config()?
            },
            kv_memory_given,
            only: self.only,
            against: self.against,
            repeats: self.repeat.into(),
            state_tokens: self.state_tokens as usize,
            prompts: self.prompts.into_iter().map(|tokens| tokens as usize).collect(),
            depths: self.depths.into_iter().map(|tokens| tokens as usize).collect(),
            questions: self.questions.into_iter().map(usize::from).collect(),
            clients: self.clients.into_iter().map(usize::from).collect(),
            quick: self.quick,
            json: self.json,
        };
        on_runtime(async { Ok(bench::run(plan).await?) })
    }
}
