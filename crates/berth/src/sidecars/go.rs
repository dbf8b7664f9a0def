//! Values as Go programs take them on the command line: durations, switches, lists of pairs.

use std::collections::BTreeMap;
use std::time::Duration;

pub(crate) use berth_core::go_duration as duration;

/// A duration of which none at all makes no sense.
pub(crate) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("it must be more than 0".to_owned()),
        duration => Ok(duration),
    }
}

/// Parses what Go's ParseBool does.
pub(crate) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// Parses how many are worked on at a time.
pub(crate) fn workers(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=100_000) => Ok(count),
        _ => Err(format!("{text:?} is no number of workers; there must be at least 1")),
    }
}

/// Parses how much of a UID goes into a name: all of it if -1.
pub(crate) fn uid_length(text: &str) -> Result<UidLength, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(UidLength(None)),
        Ok(length @ 1..=36) => Ok(UidLength(usize::try_from(length).ok())),
        _ => Err(format!("{text:?} is neither -1 (all of the UID) nor a length from 1 to 36")),
    }
}

/// How much of a UID goes into a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UidLength(pub(crate) Option<usize>);

/// Labels that a flag gives as `key:value,key:value`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Labels(pub(crate) BTreeMap<String, String>);

/// Parses labels; a pair without a colon is refused.
pub(crate) fn labels(text: &str) -> Result<Labels, String> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty()).map(|pair| {
        let (key, value) = pair
            .split_once(':')
            .ok_or_else(|| format!("{pair:?} is no label; write them like key:value,key:value"))?;
        Ok((key.trim().to_owned(), value.trim().to_owned()))
    });
    Ok(Labels(pairs.collect::<Result<_, String>>()?))
}

/// Feature gates, as `A=true,B=false`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Gates(pub(crate) BTreeMap<String, bool>);

/// The gate that can be switched.
const CROSS_NAMESPACE: &str = "CrossNamespaceVolumeDataSource";
/// All that are in their first stage, of which it is the only one here.
const ALL_ALPHA: &str = "AllAlpha";

/// What the other gates of the upstream components come to here: none can be switched.
const GATES: &[(&str, bool, &str)] = &[
    ("AllBeta", false, "there are no features to switch"),
    ("AnnotateFsResize", true, "volumes are always annotated"),
    ("CSIVolumeGroupSnapshot", true, "groups are served if the cluster and the driver know them"),
    ("HonorPVReclaimPolicy", true, "the policy is always honoured, by a finalizer on the volume"),
    ("MutableCSINodeAllocatableCount", true, "error codes of ControllerPublishVolume are always reported"),
    ("RecoverVolumeExpansionFailure", true, "recovery is always on"),
    ("ReleaseLeaderElectionOnExit", true, "the lease is always released"),
    ("Topology", true, "topology is used if the driver has it"),
    ("VolumeAttributesClass", true, "attributes are changed if the cluster and the driver can"),
];

/// Parses feature gates; one that no upstream component has is refused.
pub(crate) fn gates(text: &str) -> Result<Gates, String> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) =
            pair.split_once('=').ok_or_else(|| format!("{pair:?} misses its value; write {pair}=true"))?;
        let mut known = GATES.iter().map(|(known, ..)| *known).chain([CROSS_NAMESPACE, ALL_ALPHA]);
        if !known.any(|known| known == name) {
            return Err(format!("there is no feature gate {name:?}"));
        }
        Ok((name.to_owned(), switch(value).map_err(|why| format!("{name}: {why}"))?))
    });
    Ok(Gates(pairs.collect::<Result<_, String>>()?))
}

impl Gates {
    /// Whether claims may be made from sources in other namespaces, which grant it.
    pub(crate) fn cross_namespace_sources(&self) -> bool {
        self.0.get(CROSS_NAMESPACE).or_else(|| self.0.get(ALL_ALPHA)).copied().unwrap_or_default()
    }

    /// A sentence for each gate that asks for something else than what happens anyway.
    pub(crate) fn without_effect(&self) -> Vec<String> {
        let ignored = self.0.iter().filter_map(|(name, value)| {
            let (.., why) = GATES.iter().find(|(known, is, _)| known == name && is != value)?;
            Some(format!("--feature-gates={name}={value} has no effect here: {why}"))
        });
        ignored.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let millis = Duration::from_millis;
        for (text, expected) in [
            ("0", millis(0)),
            ("0s", millis(0)),
            ("15s", millis(15_000)),
            ("2m", millis(120_000)),
            ("1m30s", millis(90_000)),
            ("1.5h", millis(5_400_000)),
            ("300ms", millis(300)),
            ("+5s", millis(5_000)),
            (".5s", millis(500)),
            ("1h0m0s", millis(3_600_000)),
            ("7us", Duration::from_micros(7)),
            ("7µs", Duration::from_micros(7)),
            ("3ns", Duration::from_nanos(3)),
        ] {
            assert_eq!(duration(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in ["", "5", "s", "5x", "1m30", "-5s", "1..5s", "5 s", "1e3s", "99999999999999999999h"] {
            assert!(duration(text).is_err(), "{text:?} was taken as {:?}", duration(text));
        }
        assert!(positive_duration("0s").is_err());
    }

    #[test]
    fn switches_lists_and_lengths_are_read_as_go_reads_them() {
        assert_eq!(switch("T"), Ok(true));
        assert_eq!(switch("0"), Ok(false));
        assert!(switch("yes").is_err());
        assert_eq!(workers("10"), Ok(10));
        assert!(workers("0").is_err() && workers("-1").is_err());
        assert_eq!(uid_length("-1"), Ok(UidLength(None)));
        assert_eq!(uid_length("8"), Ok(UidLength(Some(8))));
        assert!(uid_length("0").is_err() && uid_length("37").is_err());
        let pairs = [("app".to_owned(), "csi".to_owned()), ("tier".to_owned(), String::new())];
        assert_eq!(labels("app:csi, tier:"), Ok(Labels(BTreeMap::from(pairs))));
        assert!(labels("app").is_err());
    }

    #[test]
    fn a_gate_that_changes_nothing_is_said_to_and_an_unknown_one_is_refused() {
        let taken = gates("Topology=true,VolumeAttributesClass=false,HonorPVReclaimPolicy=true").unwrap();
        assert_eq!(taken.0.len(), 3);
        let ignored = taken.without_effect();
        assert_eq!(ignored.len(), 1, "{ignored:?}");
        assert!(ignored[0].contains("VolumeAttributesClass=false"), "{ignored:?}");
        assert!(!taken.cross_namespace_sources());
        for (text, on) in [
            ("CrossNamespaceVolumeDataSource=true", true),
            ("AllAlpha=true", true),
            ("AllAlpha=true,CrossNamespaceVolumeDataSource=false", false),
            ("AllAlpha=false", false),
        ] {
            let taken = gates(text).unwrap();
            assert_eq!((taken.cross_namespace_sources(), taken.without_effect().len()), (on, 0), "{text}");
        }
        assert_eq!(gates("Teleport=true"), Err("there is no feature gate \"Teleport\"".to_owned()));
        assert!(gates("Topology").unwrap_err().contains("Topology=true"));
        assert!(gates("Topology=maybe").unwrap_err().contains("maybe"));
    }
}
