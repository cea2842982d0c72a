//! JavaScript policies are one module: the helpers are put before the policy, which imports them from
//! "forkpoint-policy", and what the policy throws is made the text that the contract asks for.

use anyhow::{Result, bail};

/// The module that policies import the helpers from.
const HELPERS: &str = "forkpoint-policy";

/// One module of the helpers and a policy. The helpers keep their names to themselves, so that a policy may use the
/// same ones.
pub(super) fn link(helpers: &str, policy: &str) -> Result<String> {
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
    let policy = guard(&bind(policy)?);
    Ok(format!("{imports}const $forkpoint = (() => {{\n{body}return {{ {names} }};\n}})();\n{policy}"))
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

/// The policy with its `route` exported under guard. One that exports it in another way stays as it is.
fn guard(policy: &str) -> String {
    for way in ["export function route", "export const route", "export let route"] {
        let at =
            if policy.starts_with(way) { Some(0) } else { policy.find(&format!("\n{way}")).map(|at| at + 1) };
        if let Some(at) = at {
            let (head, rest) = policy.split_at(at);
            return format!("{head}{}{GUARD}", &rest["export ".len()..]);
        }
    }
    policy.to_owned()
}

/// The policy with its import of the helpers turned into a use of them.
fn bind(policy: &str) -> Result<String> {
    let (mut out, mut rest) = (String::new(), policy);
    while let Some(at) = [format!("\"{HELPERS}\""), format!("'{HELPERS}'")].iter().find_map(|m| rest.find(m))
    {
        let before = &rest[..at];
        let start = before.rfind("import").filter(|start| *start == 0 || before[..*start].ends_with('\n'));
        let clause = start.and_then(|start| before[start + 6..].trim().strip_suffix("from")).map(str::trim);
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
        rest = &rest[at + HELPERS.len() + 2..];
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELPER: &str = "import { decide as ask } from \"forkpoint:policy/engine@0.1.0\";\n\
        /** Has no opinion. */\nexport const next = (reason) => reason;\nexport const reply =\n  (text) => text;\n";

    #[test]
    fn helpers_stand_before_the_policy_and_keep_their_names() {
        let linked = link(
            HELPER,
            "// Head.\nimport { next as pass, reply } from \"forkpoint-policy\";\nconst next = 1;\n",
        )
        .unwrap();
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
        let linked = link(HELPER, "import {\n  next,\n  reply,\n} from 'forkpoint-policy';\n").unwrap();
        assert!(linked.ends_with("const {\n  next,\n  reply,\n} = $forkpoint;\n"), "{linked}");
        let linked = link(HELPER, "import * as fp from \"forkpoint-policy\";\n").unwrap();
        assert!(linked.ends_with("const fp = $forkpoint;\n"), "{linked}");
        assert!(link(HELPER, "const other = 1;\n").unwrap().ends_with("const other = 1;\n"));
    }

    #[test]
    fn the_policy_s_route_is_exported_under_guard() {
        let linked = link(HELPER, "const a = 1;\nexport function route(request) {}\n").unwrap();
        assert!(linked.contains("\nfunction route(request) {}\n") && linked.ends_with(GUARD), "{linked}");
        let other = link(HELPER, "function f() {}\nexport { f as route };\n").unwrap();
        assert!(other.ends_with("function f() {}\nexport { f as route };\n"), "{other}");
    }

    #[test]
    fn what_cannot_be_linked_is_refused() {
        for wrong in ["import fp from \"forkpoint-policy\";", "const fp = require(\"forkpoint-policy\");"] {
            assert!(link(HELPER, wrong).is_err(), "{wrong}");
        }
    }
}
