//! Secrets of snapshot classes.

use std::collections::BTreeMap;

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use berth_kube::Key;
use k8s_openapi::api::core::v1::SecretReference;

use super::{expand, label};
use crate::failure::Failure;

/// What a secret of a snapshot class is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnapshotPurpose {
    /// It is sent with CreateSnapshot and DeleteSnapshot.
    Take,
    /// It is sent with ListSnapshots.
    List,
    /// It is sent with CreateVolumeGroupSnapshot and DeleteVolumeGroupSnapshot.
    TakeGroup,
    /// It is sent with GetVolumeGroupSnapshot.
    GetGroup,
}

impl SnapshotPurpose {
    const ALL: [Self; 4] = [Self::Take, Self::List, Self::TakeGroup, Self::GetGroup];

    fn name(self) -> &'static str {
        match self {
            Self::Take => "snapshotter",
            Self::List => "snapshotter-list",
            Self::TakeGroup => "group-snapshotter",
            Self::GetGroup => "group-snapshotter-get",
        }
    }

    /// The parameters that name it: name and namespace.
    fn keys(self) -> (String, String) {
        let name = self.name();
        (
            format!("{KUBERNETES_PARAMETER_PREFIX}{name}-secret-name"),
            format!("{KUBERNETES_PARAMETER_PREFIX}{name}-secret-namespace"),
        )
    }

    /// What its tokens begin with.
    fn subject(self) -> &'static str {
        match self {
            Self::Take | Self::List => "volumesnapshot",
            Self::TakeGroup | Self::GetGroup => "volumegroupsnapshot",
        }
    }
}

/// The secret that a snapshot class's parameters name for a purpose; `None` if they name none. Without the snapshot's
/// own name only its content's can be filled in.
pub(crate) fn snapshot_reference(
    parameters: &BTreeMap<String, String>,
    purpose: SnapshotPurpose,
    content: &str,
    snapshot: Option<&Key>,
) -> Result<Option<SecretReference>, Failure> {
    let (name_key, namespace_key) = purpose.keys();
    let (name, namespace) = match (parameters.get(&name_key), parameters.get(&namespace_key)) {
        (None, None) => return Ok(None),
        (Some(name), Some(namespace)) if !name.is_empty() && !namespace.is_empty() => (name, namespace),
        _ => {
            return Err(Failure::refused(format!(
                "either name and namespace for {} secrets specified, Both must be specified",
                purpose.name()
            )));
        }
    };
    let subject = purpose.subject();
    let mut tokens = BTreeMap::from([(format!("{subject}content.name"), content.to_owned())]);
    if let Some(snapshot) = snapshot {
        tokens.insert(format!("{subject}.namespace"), snapshot.namespace.clone());
    }
    let namespace = expand(namespace, &tokens).and_then(|text| label(text, 63, false)).map_err(|wrong| {
        Failure::refused(format!("the namespace of the {} secret, {namespace:?}, {wrong}", purpose.name()))
    })?;
    if let Some(snapshot) = snapshot {
        tokens.insert(format!("{subject}.name"), snapshot.name.clone());
    }
    let name = expand(name, &tokens).and_then(|text| label(text, 253, true)).map_err(|wrong| {
        Failure::refused(format!("the name of the {} secret, {name:?}, {wrong}", purpose.name()))
    })?;
    Ok(Some(SecretReference { name: Some(name), namespace: Some(namespace) }))
}

/// The parameters of a snapshot class that are the driver's.
pub(crate) fn snapshot_parameters(
    parameters: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let known: Vec<(String, String)> = SnapshotPurpose::ALL.iter().map(|purpose| purpose.keys()).collect();
    let mut own = BTreeMap::new();
    for (key, value) in parameters {
        if !key.starts_with(KUBERNETES_PARAMETER_PREFIX) {
            own.insert(key.clone(), value.clone());
        } else if !known.iter().any(|(name, namespace)| key == name || key == namespace) {
            return Err(Failure::refused(format!(
                "found unknown parameter key {key:?} with reserved namespace {KUBERNETES_PARAMETER_PREFIX}; correct the snapshot class"
            )));
        }
    }
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_secret_is_named_by_its_templates() {
        let snapshot = Key::new("space", "snap");
        for (purpose, prefix, name, namespace, with, expected) in [
            (
                SnapshotPurpose::Take,
                "snapshotter",
                "s-${volumesnapshot.name}",
                "${volumesnapshot.namespace}",
                true,
                Some(("space", "s-snap")),
            ),
            (
                SnapshotPurpose::Take,
                "snapshotter",
                "${volumesnapshotcontent.name}",
                "kube",
                true,
                Some(("kube", "content")),
            ),
            (SnapshotPurpose::Take, "snapshotter", "fixed", "${volumesnapshot.name}", true, None),
            (
                SnapshotPurpose::List,
                "snapshotter-list",
                "${volumesnapshotcontent.name}",
                "kube",
                false,
                Some(("kube", "content")),
            ),
            (SnapshotPurpose::List, "snapshotter-list", "${volumesnapshot.name}", "kube", false, None),
            (
                SnapshotPurpose::TakeGroup,
                "group-snapshotter",
                "${volumegroupsnapshot.name}",
                "${volumegroupsnapshot.namespace}",
                true,
                Some(("space", "snap")),
            ),
            (SnapshotPurpose::TakeGroup, "group-snapshotter", "${volumesnapshot.name}", "kube", true, None),
            (
                SnapshotPurpose::GetGroup,
                "group-snapshotter-get",
                "${volumegroupsnapshotcontent.name}",
                "kube",
                false,
                Some(("kube", "content")),
            ),
            (SnapshotPurpose::Take, "snapshotter", "", "kube", true, None),
            (SnapshotPurpose::Take, "snapshotter", "Not A Name", "kube", true, None),
        ] {
            let parameters = parameters(&[
                (&format!("csi.storage.k8s.io/{prefix}-secret-name"), name),
                (&format!("csi.storage.k8s.io/{prefix}-secret-namespace"), namespace),
            ]);
            let found = snapshot_reference(&parameters, purpose, "content", with.then_some(&snapshot));
            let found = found.ok().map(|found| found.unwrap());
            let found = found.map(|found| (found.namespace.unwrap(), found.name.unwrap()));
            let expected = expected.map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
            assert_eq!(found, expected, "{prefix} {name} {namespace}");
        }
    }

    #[test]
    fn half_a_secret_is_refused_and_none_is_fine() {
        let half = parameters(&[("csi.storage.k8s.io/snapshotter-secret-name", "a")]);
        assert!(snapshot_reference(&half, SnapshotPurpose::Take, "content", None).is_err());
        let other = snapshot_reference(&half, SnapshotPurpose::List, "content", None);
        assert!(matches!(other, Ok(None)));
    }

    #[test]
    fn the_driver_gets_its_own_parameters_and_unknown_reserved_ones_are_refused() {
        let mut given = parameters(&[
            ("speed", "fast"),
            ("csi.storage.k8s.io/snapshotter-secret-name", "a"),
            ("csi.storage.k8s.io/group-snapshotter-get-secret-namespace", "b"),
        ]);
        assert_eq!(snapshot_parameters(&given).unwrap(), parameters(&[("speed", "fast")]));
        given.insert("csi.storage.k8s.io/fstype".to_owned(), "ext4".to_owned());
        assert!(snapshot_parameters(&given).is_err());
    }
}
