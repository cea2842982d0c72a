//! A hash that stays the same: for buckets, and for keys of the store.

/// A number that depends on the parts and on nothing else: the same in every call, build and server, so that a
/// conversation or tenant keeps its bucket. Where one part ends and the next begins counts. Not for secrets: whoever
/// knows the parts can make others that collide.
#[must_use]
pub fn stable_hash<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> u64 {
    // FNV-1a, then the finalizer of MurmurHash3, because FNV's high bits hardly depend on the last bytes.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut mix = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    for part in parts {
        let part = part.as_ref();
        (part.len() as u64).to_le_bytes().into_iter().chain(part.iter().copied()).for_each(&mut mix);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::stable_hash;

    #[test]
    fn parts_and_their_ends_make_the_hash() {
        assert_eq!(stable_hash(["acme", "1"]), stable_hash(["acme".to_owned(), "1".to_owned()]));
        assert_ne!(stable_hash(["ab", "c"]), stable_hash(["a", "bc"]));
        assert_ne!(stable_hash([""; 1]), stable_hash([""; 0]));
    }

    #[test]
    fn it_never_changes_and_spreads_evenly() {
        assert_eq!(stable_hash(["acme"]), 0xbe52_9aa2_39cc_d79c, "buckets of running experiments would move");
        let mut buckets = [0; 10];
        (0..10_000).for_each(|n: u32| buckets[(stable_hash([n.to_string()]) % 10) as usize] += 1);
        assert!(buckets.iter().all(|&count| (900..1100).contains(&count)), "{buckets:?}");
    }
}
