//! From the types of one version of the contract to those of another.

use wasmtime::component::Resource;

use crate::policy::guest::Place;

/// Turns a value into what another version of the contract has for it. Moves; text and lists stay where they are.
pub(super) trait Translate<To> {
    fn translate(self) -> To;
}

/// What no version has types of its own for.
macro_rules! unchanged {
    ($($type:ty),* $(,)?) => {
        $(impl Translate<$type> for $type {
            fn translate(self) -> $type {
                self
            }
        })*
    };
}

unchanged!(String, u16, u32, u64, f32, f64, (String, String), Resource<Place>);

impl<One: Translate<Other>, Other> Translate<Vec<Other>> for Vec<One> {
    fn translate(self) -> Vec<Other> {
        self.into_iter().map(Translate::translate).collect()
    }
}

impl<One: Translate<Other>, Other> Translate<Option<Other>> for Option<One> {
    fn translate(self) -> Option<Other> {
        self.map(Translate::translate)
    }
}

/// Types with the same fields or cases in `older` and `newest`, modules that the caller names so: `in` from the guest's
/// older to the host's newest, `out` back, `both` ways. The compiler names a field or case that is forgotten.
macro_rules! same {
    (both $interface:ident { $($kind:ident $name:ident { $($body:tt)* })* }) => {
        $(
            same!($kind older::$interface::$name => newest::$interface::$name { $($body)* });
            same!($kind newest::$interface::$name => older::$interface::$name { $($body)* });
        )*
    };
    (in $interface:ident { $($kind:ident $name:ident { $($body:tt)* })* }) => {
        $(same!($kind older::$interface::$name => newest::$interface::$name { $($body)* });)*
    };
    (out $interface:ident { $($kind:ident $name:ident { $($body:tt)* })* }) => {
        $(same!($kind newest::$interface::$name => older::$interface::$name { $($body)* });)*
    };
    (struct $from:ty => $to:ty { $($field:ident),* $(,)? }) => {
        impl Translate<$to> for $from {
            fn translate(self) -> $to {
                type To = $to;
                let Self { $($field),* } = self;
                To { $($field: $field.translate()),* }
            }
        }
    };
    (enum $from:ty => $to:ty { $($case:ident $(($value:ident))?),* $(,)? }) => {
        impl Translate<$to> for $from {
            fn translate(self) -> $to {
                type To = $to;
                match self {
                    $(Self::$case $(($value))? => To::$case $(($value.translate()))?),*
                }
            }
        }
    };
}

pub(super) use same;
