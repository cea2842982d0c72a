//! `forkpoint policy test`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::super::files::write_file;
use super::super::serve::ModelArgs;
use super::super::{LogFormat, start_log};
use super::build::Language;
use super::{code_cache, print, stale};
use crate::author::case::{Case, Verdict, find};
use crate::serve::load_model;

#[derive(Debug, Args)]
pub(in crate::cli) struct TestArgs {
    /// A policy's folder, a folder of cases, or one case.
    #[arg(default_value = ".")]
    folder: PathBuf,
    /// The component [default: NAME.wasm in the folder NAME, or in the one above `tests`].
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// A case to leave out, by its folder's name.
    #[arg(long, value_name = "CASE")]
    skip: Vec<String>,
    /// Write the results as JUnit XML too.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Let a real model answer, not answers.json.
    #[arg(long)]
    live: bool,
    #[command(flatten)]
    model: ModelArgs,
}

impl TestArgs {
    pub(super) async fn run(self) -> Result<()> {
        let component = self.policy.clone().map_or_else(|| beside(&self.folder), Ok)?;
        stale::warn(&component, Some(&self.folder));
        let folders =
            cases(&self.folder).with_context(|| format!("cannot read {}", self.folder.display()))?;
        if folders.is_empty() {
            bail!(
                "no case under {}: a case is a folder with request.json and expect.json",
                self.folder.display()
            );
        }
        let engine = if self.live {
            start_log(LogFormat::Human, "warn")?;
            Some(load_model(&self.model.into_config()?.model).await?.1)
        } else {
            None
        };
        let mut verdicts = Vec::new();
        for folder in folders {
            let name = folder.strip_prefix(&self.folder).unwrap_or(&folder).to_string_lossy().into_owned();
            if self.skip.contains(&name) {
                print(&format!("skip {name}\n"))?;
                continue;
            }
            let name = if name.is_empty() { folder.to_string_lossy().into_owned() } else { name };
            let verdict = match Case::read(&folder, name.clone()) {
                Ok(case) => case.run(&component, code_cache(), engine.as_ref()).await?,
                Err(error) => Verdict { name, faults: vec![error], took: std::time::Duration::ZERO },
            };
            print(&describe(&verdict))?;
            verdicts.push(verdict);
        }
        if let Some(path) = &self.junit {
            write_file(path, junit(&component, &verdicts).as_bytes())?;
        }
        let failed = verdicts.iter().filter(|verdict| !verdict.faults.is_empty()).count();
        print(&format!("{} passed, {failed} failed\n", verdicts.len() - failed))?;
        if let Some(engine) = engine {
            tokio::task::spawn_blocking(move || engine.stop()).await?;
        }
        if failed > 0 {
            bail!("{failed} of {} cases failed", verdicts.len());
        }
        Ok(())
    }
}

/// The cases of what was named: of a policy's folder those in `tests`, for what else lies there is no case.
fn cases(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let tests = folder.join("tests");
    if folder.join("request.json").is_file() {
        return Ok(vec![folder.to_owned()]);
    }
    match (tests.is_dir(), Language::of(folder)) {
        (true, _) => find(&tests),
        (false, Err(_)) => find(folder),
        (false, Ok(_)) => Ok(Vec::new()),
    }
}

/// The component that the cases of a folder are of.
fn beside(folder: &Path) -> Result<PathBuf> {
    let full = folder.canonicalize().with_context(|| format!("cannot read {}", folder.display()))?;
    for folder in full.ancestors().take(4) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let path = folder.join(format!("{name}.wasm"));
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!(
        "no component in {} or above it: `forkpoint policy build` makes one, --policy names another",
        folder.display()
    )
}

fn describe(verdict: &Verdict) -> String {
    let word = if verdict.faults.is_empty() { "ok  " } else { "FAIL" };
    let mut text = format!("{word} {} ({:.1} ms)\n", verdict.name, verdict.took.as_secs_f64() * 1e3);
    for fault in &verdict.faults {
        // Writing to a string does not fail.
        let _ = writeln!(text, "     {fault}");
    }
    text
}

/// JUnit's XML, as CI servers read it: a suite of cases, each with its time in seconds and its failure.
fn junit(component: &Path, verdicts: &[Verdict]) -> String {
    let suite = component.file_stem().unwrap_or_default().to_string_lossy();
    let failed = verdicts.iter().filter(|verdict| !verdict.faults.is_empty()).count();
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let (name, all) = (escape(&suite), verdicts.len());
    let _ = writeln!(xml, "<testsuite name=\"{name}\" tests=\"{all}\" failures=\"{failed}\">");
    for verdict in verdicts {
        let (case, seconds) = (escape(&verdict.name), verdict.took.as_secs_f64());
        let _ = write!(xml, "  <testcase classname=\"{name}\" name=\"{case}\" time=\"{seconds:.4}\"");
        match &verdict.faults[..] {
            [] => xml += "/>\n",
            faults => {
                let _ =
                    writeln!(xml, ">\n    <failure>{}</failure>\n  </testcase>", escape(&faults.join("\n")));
            }
        }
    }
    xml + "</testsuite>\n"
}

fn escape(text: &str) -> String {
    // XML has no other control characters, not even escaped.
    let text: String = text.chars().filter(|c| !c.is_control() || *c == '\n').collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_policy_s_cases_are_in_tests() {
        let dir = tempfile::tempdir().unwrap();
        let gate = dir.path().join("gate");
        let folders = |root: &Path| cases(root).unwrap();
        for folder in ["src/rules", "tests/one", "tests/two"] {
            std::fs::create_dir_all(gate.join(folder)).unwrap();
        }
        std::fs::write(gate.join("tests/one/request.json"), "{}").unwrap();
        let both = [gate.join("tests/one"), gate.join("tests/two")];
        assert_eq!(folders(&gate), both);
        assert_eq!(folders(&gate.join("tests")), both);
        assert_eq!(folders(&gate.join("tests/one")), both[..1]);
        std::fs::write(gate.join("policy.wat"), "").unwrap();
        std::fs::remove_dir_all(gate.join("tests")).unwrap();
        assert_eq!(folders(&gate), Vec::<PathBuf>::new(), "src is no case");
    }

    #[test]
    fn the_report_is_xml_whatever_a_case_says() {
        let verdict = |name: &str, faults: &[&str]| Verdict {
            name: name.into(),
            faults: faults.iter().map(|&fault| fault.into()).collect(),
            took: Duration::from_millis(2),
        };
        let xml =
            junit(Path::new("p/gate.wasm"), &[verdict("a", &[]), verdict("b<\"", &["x & y\u{1}", "z"])]);
        assert!(xml.contains("<testsuite name=\"gate\" tests=\"2\" failures=\"1\">"), "{xml}");
        assert!(xml.contains("<testcase classname=\"gate\" name=\"a\" time=\"0.0020\"/>"), "{xml}");
        assert!(xml.contains("name=\"b&lt;&quot;\"") && xml.contains("x &amp; y\nz</failure>"), "{xml}");
    }
}
