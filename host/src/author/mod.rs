//! What authors of policies work with, none of which needs a server: test cases, replays of a journal, a lint of
//! questions, and signatures.

pub mod case;
pub mod expect;
pub mod label;
pub mod lint;
pub mod replay;
pub mod script;
pub mod sign;
