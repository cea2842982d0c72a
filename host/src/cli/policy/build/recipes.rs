//! How each language's own tools make a core module or a component.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::tool::{ASC, COMPONENTIZE_PY, COMPONENTIZE_QJS, GO, TSC, ZIG, run, run_translated};
use super::{Job, Language, kit, rust, script};
use crate::guest_tools::{self, Wit};

/// The component of a policy.
pub(super) fn build(language: Language, job: &Job<'_>) -> Result<Vec<u8>> {
    match language {
        Language::Rust => component(&rust::module(job)?, job),
        Language::C => c(job, "c"),
        Language::Cpp => c(job, "cpp"),
        Language::Js => {
            let policy = job.dir.join("policy.js");
            javascript(job, &policy, &policy.display().to_string())
        }
        Language::Ts => typescript(job),
        Language::Python => python(job),
        Language::Go => go(job),
        Language::AssemblyScript => assemblyscript(job),
        Language::Zig => zig(job),
        Language::Wat => wat(job),
    }
}

/// C, or C++ over the bindings for C. `extension` is that of the policy's sources.
fn c(job: &Job<'_>, extension: &str) -> Result<Vec<u8>> {
    let bindings = job.scratch.join("bindings");
    guest_tools::bindgen_c(Wit::Path(job.wit), &bindings)?;
    let include = |folder: &Path| format!("-I{}", folder.display());
    let object = job.scratch.join("bindings.o");
    let mut zig = ZIG.command(job.dir)?;
    zig.args(["cc", "-target", "wasm32-wasi", "-Os", "-c"]).arg(bindings.join("policy.c"));
    run(zig.arg(include(&bindings)).arg("-o").arg(&object))?;

    let core = job.scratch.join("core.wasm");
    let mut zig = ZIG.command(job.dir)?;
    if extension == "c" {
        zig.args(["cc", "-std=c11"]);
    } else {
        zig.args(["c++", "-std=c++23", "-fno-exceptions", "-fno-rtti"]);
    }
    zig.args(["-target", "wasm32-wasi", "-mexec-model=reactor", "-Os", "-Wall", "-Wl,--strip-all"]);
    // As much as Rust's; Zig's own 16 MiB would be counted as the policy's memory.
    zig.arg("-Wl,-z,stack-size=1048576");
    zig.arg(include(&bindings)).arg(include(&job.wit.join("c"))).arg(include(&job.wit.join("cpp")));
    zig.args(job.flags).args(sources(job.dir, extension)?).arg(object);
    // Carries the contract.
    zig.arg(bindings.join("policy_component_type.o")).arg("-o").arg(&core);
    run(&mut zig)?;
    without_wasi(&core, job)
}

/// `policy` is the module's file, `name` what its author knows it by.
fn javascript(job: &Job<'_>, policy: &Path, name: &str) -> Result<Vec<u8>> {
    const MODULE: &str = "linked.js";
    let module = job.scratch.join(MODULE);
    let source = read(policy)?;
    let linked =
        script::link(&read(&job.wit.join("js/policy.js"))?, &source).with_context(|| name.to_owned())?;
    if let Some(warning) = linked.warning {
        eprintln!("warning: {name}: {warning}");
    }
    kit::write_file(&module, &linked.module)?;
    let out = job.scratch.join("policy.wasm");
    let mut qjs = COMPONENTIZE_QJS.command(job.dir)?;
    qjs.arg("--wit").arg(job.wit).args(["--world", "policy", "--sync", "--stub-wasi", "--js"]).arg(module);
    let scratch = format!("{}/", job.scratch.display());
    let translate = |said: &str| linked.translate(&said.replace(&scratch, ""), MODULE, name);
    let built = run_translated(qjs.args(job.flags).arg("-o").arg(&out), translate);
    match script::others(&source).first() {
        Some(other) if built.is_err() => bail!(
            "{name} imports {other:?}, and a component in JavaScript holds one module: bundle it into the policy's \
             file first"
        ),
        _ => built?,
    }
    read_bytes(&out)
}

fn typescript(job: &Job<'_>) -> Result<Vec<u8>> {
    // The project's own tsconfig.json, which editors read too, and where the helpers' types lie here.
    let config = job.scratch.join("tsconfig.json");
    let own = job.dir.join("tsconfig.json");
    let mut settings = serde_json::json!({
        "compilerOptions": {
            "target": "es2022", "module": "es2022", "lib": ["es2023"], "types": [], "strict": true,
            "noEmit": false, "rootDir": job.dir, "outDir": job.scratch.join("js"),
        },
        "files": [job.dir.join("policy.ts"), job.wit.join("js/policy.d.ts")],
    });
    if own.is_file() {
        settings["extends"] = serde_json::json!(own);
    }
    kit::write_file(&config, &settings.to_string())?;
    run(TSC.command(job.dir)?.arg("-p").arg(config).args(job.flags))?;
    let compiled = job.scratch.join("js/policy.js");
    javascript(&Job { flags: &[], ..*job }, &compiled, "policy.js (from policy.ts)")
}

fn python(job: &Job<'_>) -> Result<Vec<u8>> {
    let out = job.scratch.join("policy.wasm");
    let mut command = COMPONENTIZE_PY.command(job.dir)?;
    command.arg("-d").arg(job.wit).args(["-w", "policy", "componentize", "--stub-wasi", "-p"]).arg(job.dir);
    command.arg("-p").arg(job.wit.join("python")).args(job.flags).arg("policy").arg("-o").arg(&out);
    // Its own trace says nothing of the policy, whose trace Python prints.
    run(command.env("RUST_BACKTRACE", "0"))?;
    read_bytes(&out)
}

fn go(job: &Job<'_>) -> Result<Vec<u8>> {
    // The helpers and the bindings are one module.
    for (path, _) in kit::helpers(Language::Go) {
        copy(&job.wit.join(path), &job.scratch.join(path))?;
    }
    let helpers = job.scratch.join("go");
    kit::bind_go(job.wit, &helpers)?;
    // The policy's own module file stays as it is; a copy learns where the helpers lie.
    let modules = job.scratch.join("go.mod");
    copy(&job.dir.join("go.mod"), &modules)?;
    if job.dir.join("go.sum").is_file() {
        copy(&job.dir.join("go.sum"), &job.scratch.join("go.sum"))?;
    }
    let command = || -> Result<_> {
        let mut go = GO.command(job.dir)?;
        go.current_dir(job.dir).env("GOFLAGS", "-mod=mod").env("GOTOOLCHAIN", "local").env("GOWORK", "off");
        Ok(go)
    };
    let replaced = format!("-replace={}={}", kit::GO_MODULE, helpers.display());
    let required = format!("-require={}@v0.0.0", kit::GO_MODULE);
    run(command()?.args(["mod", "edit", &required, &replaced]).arg(&modules))?;
    let core = job.scratch.join("core.wasm");
    let mut build = command()?;
    build.env("GOOS", "wasip1").env("GOARCH", "wasm").args(["build", "-buildmode=c-shared", "-trimpath"]);
    build.arg("-ldflags=-s -w").arg(format!("-modfile={}", modules.display())).args(job.flags);
    run(build.arg("-o").arg(&core).arg("."))?;
    // Go describes the exports that it has, and not the world.
    without_wasi(&core, job)
}

fn assemblyscript(job: &Job<'_>) -> Result<Vec<u8>> {
    let core = job.scratch.join("core.wasm");
    let mut asc = ASC.command(job.dir)?;
    asc.current_dir(job.dir).arg("assembly/policy.ts").arg("--lib").arg(job.wit.join("assemblyscript"));
    // An instance serves one request, so nothing is freed; a failed assertion traps, and imports nothing to say why.
    asc.args(["-O3", "--shrinkLevel", "2", "--runtime", "stub", "--use", "abort="]);
    run(asc.args(job.flags).arg("-o").arg(&core))?;
    component(&core, job)
}

fn zig(job: &Job<'_>) -> Result<Vec<u8>> {
    let core = job.scratch.join("core.wasm");
    let mut zig = ZIG.command(job.dir)?;
    zig.args([
        "build-exe",
        "-target",
        "wasm32-freestanding",
        "-fno-entry",
        "-rdynamic",
        "-O",
        "ReleaseSmall",
    ]);
    zig.args(job.flags).args(["--dep", "forkpoint"]).arg(assign("-Mroot=", &job.dir.join("policy.zig")));
    zig.arg(assign("-Mforkpoint=", &job.wit.join("zig/forkpoint.zig"))).arg(assign("-femit-bin=", &core));
    run(&mut zig)?;
    component(&core, job)
}

fn wat(job: &Job<'_>) -> Result<Vec<u8>> {
    if let Some(flag) = job.flags.first() {
        bail!("{} is for a compiler, and WebAssembly text has none", flag.display());
    }
    let path = job.dir.join("policy.wat");
    let module = include_helpers(&read(&path)?, &read(&job.wit.join("wat/forkpoint.wat"))?);
    guest_tools::componentize(module.as_bytes(), false, Wit::Path(job.wit))
        .with_context(|| format!("cannot make a component of {}", path.display()))
}

/// Puts the helpers where a line of the policy asks for them. On one line, so that errors name the policy's own.
fn include_helpers(policy: &str, helpers: &str) -> String {
    let code = helpers.lines().map(|line| line.split(";;").next().unwrap_or("").trim());
    let helpers = code.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let lines =
        policy.lines().map(|line| if line.trim() == ";; include forkpoint.wat" { &helpers } else { line });
    lines.collect::<Vec<_>>().join("\n")
}

fn component(core: &Path, job: &Job<'_>) -> Result<Vec<u8>> {
    Ok(guest_tools::componentize(&read_bytes(core)?, false, Wit::Path(job.wit))?)
}

/// The component of a module whose runtime is made for WASI, which policies are refused.
fn without_wasi(core: &Path, job: &Job<'_>) -> Result<Vec<u8>> {
    let core = read_bytes(core)?;
    Ok(if job.wasi {
        guest_tools::componentize(&core, true, Wit::Path(job.wit))?
    } else {
        guest_tools::componentize_without_wasi(&core, Wit::Path(job.wit))?
    })
}

/// The files of `dir` with this extension, in order.
fn sources(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    let mut paths: Vec<_> =
        paths.into_iter().filter(|path| path.extension() == Some(OsStr::new(extension))).collect();
    paths.sort();
    Ok(paths)
}

fn assign(flag: &str, path: &Path) -> std::ffi::OsString {
    let mut out = std::ffi::OsString::from(flag);
    out.push(path);
    out
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    kit::write_file(to, &read(from)?)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helpers_in_text_take_one_line() {
        let helpers = ";; Head.\n(func $f ;; why\n  nop)\n";
        let module = include_helpers("(module\n  ;; include forkpoint.wat\n  (func $g))", helpers);
        assert_eq!(module, "(module\n(func $f nop)\n  (func $g))");
    }
}
