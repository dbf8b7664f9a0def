//! Where a volume can be reached from.

use std::{collections::BTreeMap, fmt};

/// The topology of a node or a volume, as key and value pairs: `topology.berth.dev/node = node-1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Topology(pub BTreeMap<String, String>);

impl Topology {
    /// A topology of one segment.
    pub fn single(key: impl Into<String>, value: impl Into<String>) -> Self {
        Self(BTreeMap::from([(key.into(), value.into())]))
    }

    /// Whether every segment that `wanted` asks for is in this topology.
    pub fn satisfies(&self, wanted: &Self) -> bool {
        wanted.0.iter().all(|(key, value)| self.0.get(key) == Some(value))
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.0.iter().enumerate() {
            write!(f, "{}{key}={value}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topology_satisfies_itself_and_anything_less_specific() {
        let here = Topology(BTreeMap::from([("zone".into(), "a".into()), ("node".into(), "1".into())]));
        assert!(here.satisfies(&here));
        assert!(here.satisfies(&Topology::single("zone", "a")));
        assert!(!here.satisfies(&Topology::single("zone", "b")));
        assert!(!here.satisfies(&Topology::single("rack", "1")));
        assert_eq!(here.to_string(), "node=1, zone=a");
    }
}
