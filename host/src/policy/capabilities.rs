//! What a policy may do besides asking questions: asked for by its manifest, granted by the operator. What is both
//! asked and granted holds.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Names that are meant: every one, or a list. In TOML and JSON, `"all"` or `["a", "b"]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    /// Every name.
    All,
    /// These.
    Only(BTreeSet<String>),
}

impl Names {
    /// No name.
    #[must_use]
    pub fn none() -> Self {
        Self::Only(BTreeSet::new())
    }

    /// Whether a name is among them.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.contains(name),
        }
    }

    fn and(&self, other: &Self) -> Self {
        match (self, other) {
            (Self::All, names) | (names, Self::All) => names.clone(),
            (Self::Only(left), Self::Only(right)) => Self::Only(left & right),
        }
    }

    /// Names of headers are the same in any case.
    fn in_lower_case(&self) -> Self {
        match self {
            Self::All => Self::All,
            Self::Only(names) => Self::Only(names.iter().map(|name| name.to_ascii_lowercase()).collect()),
        }
    }
}

impl Serialize for Names {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_str("all"),
            Self::Only(names) => names.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesVisitor;

        impl<'de> serde::de::Visitor<'de> for NamesVisitor {
            type Value = Names;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("\"all\" or a list of names")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Names, E> {
                match text {
                    "all" => Ok(Names::All),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Names, A::Error> {
                let mut names = BTreeSet::new();
                while let Some(name) = list.next_element()? {
                    names.insert(name);
                }
                Ok(Names::Only(names))
            }
        }

        deserializer.deserialize_any(NamesVisitor)
    }
}

/// Capabilities, each on or off, or by name. In a manifest what is not said is not asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Capabilities {
    /// Write drafts.
    pub generate: bool,
    /// Keep state: `get`, `set` and `add`.
    pub store: bool,
    /// Write to the server's log.
    pub log: bool,
    /// See these headers of the client's request, in any case.
    pub headers: Names,
    /// Forward to these upstreams.
    pub upstreams: Names,
    /// Reply from these models by name.
    pub models: Names,
    /// Mount these of the operator's tools. Those of the request need no leave.
    pub tools: Names,
    /// Answer under these model names besides the policy's own.
    pub routes: Names,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            generate: false,
            store: false,
            log: false,
            headers: Names::none(),
            upstreams: Names::none(),
            models: Names::none(),
            tools: Names::none(),
            routes: Names::none(),
        }
    }
}

impl Capabilities {
    /// What a component without a `[capabilities]` table asks for.
    #[must_use]
    pub fn all() -> Self {
        Self {
            generate: true,
            store: true,
            log: true,
            headers: Names::All,
            upstreams: Names::All,
            models: Names::All,
            tools: Names::All,
            routes: Names::All,
        }
    }

    /// What is granted where the operator says nothing: all but the client's headers, which may hold what is
    /// nobody's business.
    #[must_use]
    pub fn usual_grant() -> Self {
        Self { headers: Names::none(), ..Self::all() }
    }

    /// What is in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            generate: self.generate && other.generate,
            store: self.store && other.store,
            log: self.log && other.log,
            headers: self.headers.in_lower_case().and(&other.headers.in_lower_case()),
            upstreams: self.upstreams.and(&other.upstreams),
            models: self.models.and(&other.models),
            tools: self.tools.and(&other.tools),
            routes: self.routes.and(&other.routes),
        }
    }

    /// What is asked for by name here and not in `granted`, as words such as `upstreams.strong`.
    #[must_use]
    pub fn beyond(&self, granted: &Self) -> Vec<String> {
        let switches = [
            ("generate", self.generate, granted.generate),
            ("store", self.store, granted.store),
            ("log", self.log, granted.log),
        ];
        let switches = switches.into_iter().filter(|(_, asked, granted)| *asked && !granted);
        let lists = [
            ("headers", self.headers.in_lower_case(), granted.headers.in_lower_case()),
            ("upstreams", self.upstreams.clone(), granted.upstreams.clone()),
            ("models", self.models.clone(), granted.models.clone()),
            ("tools", self.tools.clone(), granted.tools.clone()),
            ("routes", self.routes.clone(), granted.routes.clone()),
        ];
        let names = lists.into_iter().flat_map(|(kind, asked, granted)| match asked {
            Names::All => Vec::new(),
            Names::Only(names) => {
                let missing = names.into_iter().filter(|name| !granted.has(name));
                missing.map(|name| format!("{kind}.{name}")).collect()
            }
        });
        switches.map(|(name, ..)| name.to_owned()).chain(names).collect()
    }
}

/// `[policies.<name>.grant]`: what an operator says of a policy's capabilities; the rest is as for every policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grant {
    /// Drafts.
    pub generate: Option<bool>,
    /// State.
    pub store: Option<bool>,
    /// The log.
    pub log: Option<bool>,
    /// Headers of the client.
    pub headers: Option<Names>,
    /// Upstreams.
    pub upstreams: Option<Names>,
    /// Models.
    pub models: Option<Names>,
    /// The operator's tools.
    pub tools: Option<Names>,
    /// Model names.
    pub routes: Option<Names>,
}

impl Grant {
    /// `usual`, with what is said here in its place.
    #[must_use]
    pub fn over(&self, usual: &Capabilities) -> Capabilities {
        let names = |own: &Option<Names>, usual: &Names| own.clone().unwrap_or_else(|| usual.clone());
        Capabilities {
            generate: self.generate.unwrap_or(usual.generate),
            store: self.store.unwrap_or(usual.store),
            log: self.log.unwrap_or(usual.log),
            headers: names(&self.headers, &usual.headers),
            upstreams: names(&self.upstreams, &usual.upstreams),
            models: names(&self.models, &usual.models),
            tools: names(&self.tools, &usual.tools),
            routes: names(&self.routes, &usual.routes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_and_granted_holds() {
        let asked: Capabilities = toml::from_str(
            "generate = true\nheaders = ['X-Tenant', 'x-team']\nupstreams = ['strong']\ntools = 'all'",
        )
        .unwrap();
        let grant: Grant =
            toml::from_str("headers = ['x-tenant']\nupstreams = ['cheap']\ntools = ['ls']").unwrap();
        let granted = grant.over(&Capabilities::usual_grant());
        let both = asked.and(&granted);
        assert!(both.generate && !both.store && !both.log);
        assert!(both.headers.has("x-tenant") && !both.headers.has("x-team"));
        assert!(!both.upstreams.has("strong") && !both.upstreams.has("cheap"));
        assert!(both.tools.has("ls") && !both.tools.has("rm"));
        assert_eq!(asked.beyond(&granted), ["headers.x-team", "upstreams.strong"]);
    }

    #[test]
    fn a_bare_component_gets_what_is_granted() {
        let granted = Capabilities::usual_grant();
        assert_eq!(Capabilities::all().and(&granted), granted);
        assert!(!granted.headers.has("authorization"));
        assert!(Capabilities::all().beyond(&granted).is_empty(), "it asks for nothing by name");
    }

    #[test]
    fn names_are_all_or_a_list() {
        for wrong in ["upstreams = 'strong'", "upstreams = true", "upstream = []", "generate = 'yes'"] {
            assert!(toml::from_str::<Capabilities>(wrong).is_err(), "{wrong}");
        }
        let all = serde_json::to_value(Capabilities::all()).unwrap();
        assert_eq!((&all["tools"], &all["store"]), (&"all".into(), &true.into()));
    }
}
