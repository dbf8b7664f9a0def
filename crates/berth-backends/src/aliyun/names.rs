//! What disks and snapshots are called at Alibaba Cloud, their tags, and the tokens that make a creation happen once.

use berth_core::hex;
use sha2::{Digest as _, Sha256};

/// The tags that upstream's driver puts on disks.
pub(super) const OF_KUBERNETES: (&str, &str) = ("k8s.aliyun.com", "true");
/// And on disks and snapshots.
pub(super) const CREATED_BY: (&str, &str) = ("createdby", "alibabacloud-csi-plugin");
/// The tag with the cluster's id.
pub(super) const CLUSTER: &str = "ack.aliyun.com";
/// The tag with the name that the caller gave a volume: names of disks are not unique, and cannot be just anything.
pub(super) const VOLUME_NAME: &str = "csi.alibabacloud.com/volume-name";
/// A tag of upstream's snapshots.
pub(super) const FORCED_DELETE: (&str, &str) = ("force.delete.snapshot.k8s.aliyun.com", "true");
/// The tag of a cloned disk, and of the snapshot that it is made of, with the id of the disk that is cloned.
pub(super) const CLONE_TAG: &str = "csi.berth.dev/clone-of";

/// Names are at least this long, in characters, and at most that.
const LENGTHS: std::ops::RangeInclusive<usize> = 2..=128;
/// How much of a name is kept beside its hash.
const KEPT: usize = 80;
/// The longest client token.
const LONGEST_TOKEN: usize = 64;

/// Whether a disk or snapshot may be called so: letters, digits and `:_.-`, a letter first. Snapshots that the provider takes by
/// itself begin with `auto`.
fn is_allowed(name: &str) -> bool {
    let is_letter = |c: char| c.is_alphabetic();
    let is_inner = |c: char| c.is_alphabetic() || c.is_ascii_digit() || ":_.-".contains(c);
    LENGTHS.contains(&name.chars().count())
        && name.starts_with(is_letter)
        && name.chars().all(is_inner)
        && !name.starts_with("auto")
}

/// The name itself if the API takes it, else one made of it, always the same.
pub(super) fn api_name(name: &str) -> String {
    if is_allowed(name) {
        return name.to_owned();
    }
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "_.-".contains(*c);
    let plain: String = name.chars().map(|c| if is_plain(&c) { c } else { '-' }).take(KEPT).collect();
    format!("v-{plain}-{}", &hex(&Sha256::digest(name.as_bytes())[..8]))
}

/// The name of the snapshot that a clone is made of.
pub(super) fn clone_name(volume: &str) -> String {
    format!("berth-clone-{}", &hex(&Sha256::digest(volume.as_bytes())[..12]))
}

/// The token of a creation. A token whose disk was removed gives the id of that disk for ever, so there is another for the next
/// one of the same name. The first is upstream's.
pub(super) fn token(name: &str, generation: u32) -> String {
    let first = format!("n:{name}");
    if generation == 0 && first.len() <= LONGEST_TOKEN && first.is_ascii() {
        return first;
    }
    format!("h:{}", &hex(&Sha256::digest(format!("{generation}:{name}"))[..24]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_becomes_one_that_the_api_takes_and_no_two_the_same() {
        let long = "n".repeat(128);
        for name in ["disk-0d2a", "ab", "名字", &long] {
            assert_eq!(api_name(name), name);
        }
        let mut seen = std::collections::HashSet::new();
        for name in ["a", "1abc", "-x", "a b", "a/b", "autoshot", &"n".repeat(129), &"名".repeat(200)] {
            let made = api_name(name);
            assert!(is_allowed(&made) && api_name(&made) == made, "{made}");
            assert!(seen.insert(made));
        }
        assert!(is_allowed(&clone_name(&long)));
    }

    #[test]
    fn tokens_are_short_and_differ_by_name_and_generation() {
        assert_eq!(token("disk-1", 0), "n:disk-1");
        let long = "n".repeat(128);
        let mut seen = std::collections::HashSet::new();
        for name in ["disk-1", "名字", &long, &long[..127]] {
            for generation in 0..3 {
                let made = token(name, generation);
                assert!(made.len() <= LONGEST_TOKEN && made.is_ascii(), "{made}");
                assert_eq!(token(name, generation), made);
                assert!(seen.insert(made));
            }
        }
    }
}
