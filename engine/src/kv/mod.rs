//! Keys and values: pages and who holds them. Pure bookkeeping: the numbers
//! themselves lie in the device's arena.

mod pages;
mod sequence;

pub(crate) use pages::{Chain, Pages, branch, root};
pub(crate) use sequence::{PageCopy, Purpose, Sequence, Shortage};

#[cfg(test)]
mod tests;
