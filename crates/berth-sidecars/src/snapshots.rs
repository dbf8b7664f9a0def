//! The snapshot kinds: their definitions, to be created in clusters that lack them.

/// The definitions of the snapshot and group snapshot kinds, as objects.
pub fn definitions() -> Vec<serde_json::Value> {
    [
        include_str!("snapshots/volumesnapshotclasses.yaml"),
        include_str!("snapshots/volumesnapshotcontents.yaml"),
        include_str!("snapshots/volumesnapshots.yaml"),
        include_str!("snapshots/volumegroupsnapshotclasses.yaml"),
        include_str!("snapshots/volumegroupsnapshotcontents.yaml"),
        include_str!("snapshots/volumegroupsnapshots.yaml"),
    ]
    .into_iter()
    .map(|text| serde_yaml_ng::from_str(text).expect("the definitions are well-formed, which a test checks"))
    .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_definition_is_well_formed_and_named_after_what_it_defines() {
        for definition in super::definitions() {
            let spec = &definition["spec"];
            let name =
                format!("{}.{}", spec["names"]["plural"].as_str().unwrap(), spec["group"].as_str().unwrap());
            assert_eq!(definition["metadata"]["name"], name);
            let stored =
                spec["versions"].as_array().unwrap().iter().filter(|version| version["storage"] == true);
            assert_eq!(stored.count(), 1, "{name}");
        }
    }
}
