//! The `#[policy]` attribute of `forkpoint-policy`. It is that crate's detail: use it from there.

use proc_macro::{TokenStream, TokenTree};

/// Exports a function as the component's `route`.
///
/// The function takes `&Request` and `&Session` and returns `Result<T>`, where `T` is `Routing` or turns into
/// one. There is one such function in a component.
#[proc_macro_attribute]
pub fn policy(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let call = if !arguments.is_empty() {
        "compile_error! { \"#[policy] takes no arguments\" }".to_owned()
    } else if let Some(name) = function_name(item.clone()) {
        format!("::forkpoint_policy::export_route! {{ {name} }}")
    } else {
        "compile_error! { \"#[policy] goes on a function\" }".to_owned()
    };
    let call: TokenStream = call.parse().expect("fixed text and an identifier always lex");
    let mut out = item;
    out.extend(call);
    out
}

/// The identifier after the item's own `fn`: whatever precedes it at this level is attributes and qualifiers.
fn function_name(item: TokenStream) -> Option<String> {
    let mut tokens = item.into_iter();
    tokens.find(|token| matches!(token, TokenTree::Ident(word) if word.to_string() == "fn"))?;
    match tokens.next() {
        Some(TokenTree::Ident(name)) => Some(name.to_string()),
        _ => None,
    }
}
