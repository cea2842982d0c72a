//! JavaScript policies are one module: the helpers are put before the policy, which imports them from
//! "forkpoint-policy", and what the policy throws is made the text that the contract asks for.

use anyhow::{Result, bail};

/// The module that policies import the helpers from.
const HELPERS: &str = "forkpoint-policy";

/// What a policy's module became.
#[derive(Debug)]
pub(super) struct Linked {
    /// The one module.
    pub(super) module: String,
    /// How many of its lines stand before the policy's, and how many of them the policy has.
    before: usize,
    lines: usize,
    /// What its author should know.
    pub(super) warning: Option<&'static str>,
}

/// One module of the helpers and a policy. The helpers keep their names to themselves, so that a policy may use the
/// same ones.
pub(super) fn link(helpers: &str, policy: &str) -> Result<Linked> {
    let (mut imports, mut body, mut names) = (String::new(), String::new(), Vec::new());
    for line in helpers.lines() {
        if line.starts_with("import ") {
            imports += &format!("{line}\n");
        } else if let Some(rest) = line.strip_prefix("export const ") {
            names.extend(rest.split([' ', '=']).next());
            body += &format!("const {rest}\n");
        } else {
            body += &format!("{line}\n");
        }
    }
    let names = names.join(", ");
    let head = format!("{imports}const $forkpoint = (() => {{\n{body}return {{ {names} }};\n}})();\n");
    let (before, lines) = (head.lines().count(), policy.lines().count());
    let (policy, warning) = guard(&bind(policy)?);
    Ok(Linked { module: head + &policy, before, lines, warning })
}

impl Linked {
    /// What was said of the module's file `module`, as said of the policy's: `linked.js:52:7` becomes `policy.js:9:7`.
    pub(super) fn translate(&self, said: &str, module: &str, policy: &str) -> String {
        let (mut out, mut rest) = (String::new(), said);
        while let Some(at) = rest.find(module) {
            // componentize-qjs sees the file in a root of its own.
            out += rest[..at].strip_suffix('/').unwrap_or(&rest[..at]);
            rest = &rest[at + module.len()..];
            let digits = rest
                .strip_prefix(':')
                .map_or("", |rest| &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())]);
            let Ok(line) = digits.parse::<usize>() else {
                out += policy;
                continue;
            };
            rest = &rest[1 + digits.len()..];
            match line.checked_sub(self.before) {
                // What follows the policy is its guard, where what it leaves open is noticed.
                Some(own @ 1..) => out += &format!("{policy}:{}", own.min(self.lines)),
                _ => out += &format!("{HELPERS}:{line}"),
            }
        }
        out + rest
    }
}

/// Modules that a policy imports besides the helpers and the contract.
pub(super) fn others(policy: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, quote) in policy.match_indices(['"', '\'']) {
        let (before, after) = (&policy[..at], &policy[at + 1..]);
        let line = before.rsplit('\n').next().unwrap_or_default().trim_start();
        let called = before.trim_end().ends_with('(');
        let starts = ["import", "export", "}"].iter().any(|word| line.starts_with(word));
        if !is_module(before) || !(called || starts || line.contains("} from")) {
            continue;
        }
        let name = after.split(quote).next().unwrap_or_default();
        if name != HELPERS && !name.starts_with("forkpoint:") && !name.contains('\n') {
            found.push(name);
        }
    }
    found
}

/// Around the policy's `route`: an error that is no text would trap rather than be read.
const GUARD: &str = "
const $guarded = (request, session) => {
  try {
    return route(request, session);
  } catch (error) {
    throw $forkpoint.reason(error);
  }
};
export { $guarded as route };
";

const ASYNC: &str =
    "route is async, and every call of it would trap: write `export function route`, without await";
const UNGUARDED: &str = "route is exported without a guard, and what it throws traps unless it is text: \
    write `export function route` or `export const route` at the start of a line";

/// The policy with its `route` exported under guard, and a warning. One that exports it in another way stays as it is.
fn guard(policy: &str) -> (String, Option<&'static str>) {
    if exported(policy, "export async function route").is_some() {
        return (policy.to_owned(), Some(ASYNC));
    }
    let ways = ["export function route", "export const route", "export let route"];
    let Some(at) = ways.iter().find_map(|way| exported(policy, way)) else {
        return (policy.to_owned(), Some(UNGUARDED));
    };
    let (head, rest) = policy.split_at(at);
    // Blanks, so that columns stay.
    let rest = format!("       {}", &rest["export ".len()..]);
    let is_async = rest.split_once('=').is_some_and(|(name, value)| {
        name.split_whitespace().eq(["const", "route"]) && value.trim_start().starts_with("async")
    });
    (format!("{head}{rest}{GUARD}"), is_async.then_some(ASYNC))
}

/// Where a line starts with `way`, and the name at its end goes no further.
fn exported(policy: &str, way: &str) -> Option<usize> {
    let starts = |at: usize| at == 0 || policy[..at].ends_with('\n');
    let ends =
        |at: usize| policy[at + way.len()..].starts_with(|c: char| c == '(' || c == '=' || c.is_whitespace());
    policy.match_indices(way).map(|(at, _)| at).find(|at| starts(*at) && ends(*at))
}

/// The policy with its import of the helpers turned into a use of them.
fn bind(policy: &str) -> Result<String> {
    let (mut out, mut rest) = (String::new(), policy);
    let quoted = [format!("\"{HELPERS}\""), format!("'{HELPERS}'")];
    while let Some(at) = quoted.iter().filter_map(|name| rest.find(name)).min() {
        let (before, after) = (&rest[..at], at + quoted[0].len());
        if !is_module(before) {
            // The name in other text.
            out += &rest[..after];
            rest = &rest[after..];
            continue;
        }
        let starts = |start: &usize| *start == 0 || before[..*start].ends_with('\n');
        let start = before.rmatch_indices("import").map(|(start, _)| start).find(starts);
        let clause = start.and_then(|start| before[start + 6..].trim().strip_suffix("from")).map(str::trim);
        // With a quote or an end in between, the import is of another module.
        let clause = clause.filter(|clause| !clause.contains(['"', '\'', ';']));
        let (Some(start), Some(clause)) = (start, clause) else {
            bail!("expected `import {{ … }} from \"{HELPERS}\";` at the start of a line");
        };
        let taken = if clause.starts_with('{') {
            clause.replace(" as ", ": ")
        } else if let Some(name) = clause.strip_prefix("* as ") {
            name.to_owned()
        } else {
            bail!("import names from \"{HELPERS}\": it has no default export");
        };
        out += &rest[..start];
        out += &format!("const {taken} = $forkpoint");
        rest = &rest[after..];
    }
    Ok(out + rest)
}

/// Whether what follows is the name of a module: after `from`, `import` or a call of `require`, outside a comment.
fn is_module(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or_default().trim_start();
    let loads = ["from", "import", "import(", "require("];
    let before = before.trim_end();
    let word = |c: char| c.is_alphanumeric() || "_$.".contains(c);
    let is_load = |load: &&str| before.strip_suffix(*load).is_some_and(|rest| !rest.ends_with(word));
    !["//", "/*", "*"].iter().any(|comment| line.starts_with(comment)) && loads.iter().any(is_load)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELPER: &str = "import { decide as ask } from \"forkpoint:policy/engine@0.1.0\";\n\
        /** Has no opinion. */\nexport const next = (reason) => reason;\nexport const reply =\n  (text) => text;\n";

    fn module(policy: &str) -> String {
        link(HELPER, policy).unwrap().module
    }

    #[test]
    fn helpers_stand_before_the_policy_and_keep_their_names() {
        let linked =
            module("// Head.\nimport { next as pass, reply } from \"forkpoint-policy\";\nconst next = 1;\n");
        assert!(linked.starts_with("import { decide as ask } from"), "{linked}");
        assert!(
            linked.contains("const reply =\n  (text) => text;\nreturn { next, reply };\n})();"),
            "{linked}"
        );
        assert!(
            linked.ends_with("// Head.\nconst { next: pass, reply } = $forkpoint;\nconst next = 1;\n"),
            "{linked}"
        );
    }

    #[test]
    fn imports_may_span_lines_and_name_the_whole() {
        let linked = module("import {\n  next,\n  reply,\n} from 'forkpoint-policy';\n");
        assert!(linked.ends_with("const {\n  next,\n  reply,\n} = $forkpoint;\n"), "{linked}");
        let linked = module("import * as fp from \"forkpoint-policy\";\n");
        assert!(linked.ends_with("const fp = $forkpoint;\n"), "{linked}");
        assert!(module("const other = 1;\n").ends_with("const other = 1;\n"));
        let linked =
            module("import { next } from 'forkpoint-policy';\nimport { reply } from \"forkpoint-policy\";\n");
        assert!(
            linked.ends_with("const { next } = $forkpoint;\nconst { reply } = $forkpoint;\n"),
            "{linked}"
        );
        let linked = module("import { imported } from \"forkpoint-policy\";\n");
        assert!(linked.ends_with("const { imported } = $forkpoint;\n"), "{linked}");
    }

    #[test]
    fn the_module_s_name_in_other_text_stays() {
        let import = "import { next } from \"forkpoint-policy\";\n";
        for other in [
            "// The helpers of \"forkpoint-policy\".\n",
            "// Taken from \"forkpoint-policy\".\n",
            "const name = 'forkpoint-policy';\n",
            "log(\"info\", \"forkpoint-policy\");\n",
            "const kept = upfrom + \"forkpoint-policy\";\n",
        ] {
            for linked in [module(&format!("{other}{import}")), module(&format!("{import}{other}"))] {
                assert!(
                    linked.contains(other) && linked.contains("const { next } = $forkpoint;\n"),
                    "{linked}"
                );
            }
        }
    }

    #[test]
    fn the_policy_s_route_is_exported_under_guard() {
        for (exported, kept) in [
            ("export function route(request) {}", "       function route(request) {}"),
            ("export function route (request) {}", "       function route (request) {}"),
            ("export const route = (request) => 1;", "       const route = (request) => 1;"),
            ("export const route=(request) => 1;", "       const route=(request) => 1;"),
        ] {
            let linked = link(HELPER, &format!("const a = 1;\n{exported}\n")).unwrap();
            let module = linked.module;
            assert!(module.contains(&format!("\n{kept}\n")) && module.ends_with(GUARD), "{module}");
            assert_eq!(linked.warning, None, "{exported}");
        }
    }

    #[test]
    fn a_longer_name_is_not_taken_for_route() {
        let longer = "export function routeByTools(request) {}\nexport const routes = [];\n";
        let linked = link(HELPER, &format!("{longer}export function route(request) {{}}\n")).unwrap();
        assert!(
            linked.module.contains(&format!("{longer}       function route(request) {{}}\n")),
            "{}",
            linked.module
        );
        let none = link(HELPER, longer).unwrap();
        assert!(none.module.ends_with(longer), "{}", none.module);
        assert_eq!(none.warning, Some(UNGUARDED));
    }

    #[test]
    fn a_route_that_no_guard_can_help_is_warned_of() {
        for (policy, warning) in [
            ("function f() {}\nexport { f as route };\n", UNGUARDED),
            ("export async function route(request) {}\n", ASYNC),
            ("const a = 1;\nexport const route = async (request) => 1;\n", ASYNC),
        ] {
            assert_eq!(link(HELPER, policy).unwrap().warning, Some(warning), "{policy}");
        }
        let other = module("function f() {}\nexport { f as route };\n");
        assert!(other.ends_with("function f() {}\nexport { f as route };\n"), "{other}");
        let inner = "export const route = (request) => later(async () => 1);\n";
        assert_eq!(link(HELPER, inner).unwrap().warning, None);
    }

    #[test]
    fn what_is_said_of_the_module_is_said_of_the_policy() {
        let policy =
            "import { next } from \"forkpoint-policy\";\nexport function route(request) {\n  oops(;\n}\n";
        let linked = link(HELPER, policy).unwrap();
        let line = 1 + linked.module.lines().position(|line| line.contains("oops")).unwrap();
        let translate = |said: &str| linked.translate(said, "linked.js", "my/policy.js");
        assert_eq!(
            translate(&format!("SyntaxError: unexpected token\n    at /linked.js:{line}:8\n")),
            "SyntaxError: unexpected token\n    at my/policy.js:3:8\n"
        );
        assert_eq!(translate("linked.js:1: x, linked.js:9999"), "forkpoint-policy:1: x, my/policy.js:4");
        assert_eq!(translate("JS: linked.js\nlinked.js"), "JS: my/policy.js\nmy/policy.js");
        assert_eq!(translate("nothing:3"), "nothing:3");
    }

    #[test]
    fn columns_stay_where_the_export_goes() {
        let policy = "const a = 1;\nexport function route(request) { return request; }\n";
        let linked = link(HELPER, policy).unwrap().module;
        let column = |text: &str| text.lines().find_map(|line| line.find("return request"));
        assert_eq!(column(&linked), column(policy));
    }

    #[test]
    fn modules_besides_the_helpers_are_found() {
        let policy = "import { a,\n  b } from './rules.js';\nimport \"lodash\";\nexport * from \"./all.js\";\n\
            import {\n  c,\n} from \"../c.js\";\nconst d = require(\"./d.js\");\n\
            import { next } from \"forkpoint-policy\";\nimport { log } from \"forkpoint:policy/host@0.1.0\";\n\
            // import x from \"./x.js\"\nconst said = 'taken from \"y.js\"';\n";
        assert_eq!(others(policy), ["./rules.js", "lodash", "./all.js", "../c.js", "./d.js"]);
    }

    #[test]
    fn what_cannot_be_linked_is_refused() {
        for wrong in [
            "import fp from \"forkpoint-policy\";",
            "const fp = require(\"forkpoint-policy\");",
            "import \"forkpoint-policy\";",
            "export { next } from \"forkpoint-policy\";",
            "import { a } from \"other\";\nexport { next } from \"forkpoint-policy\";",
        ] {
            assert!(link(HELPER, wrong).is_err(), "{wrong}");
        }
    }
}
