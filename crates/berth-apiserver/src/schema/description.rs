//! The descriptions of types and fields in `kubectl explain`, in our own words, for the storage kinds.

use std::collections::HashMap;
use std::sync::LazyLock;

static TEXTS: LazyLock<HashMap<&'static str, &'static str>> = LazyLock::new(|| {
    include_str!("kubernetes.descriptions")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(' '))
        .collect()
});

/// What a built-in type is for, by its name in the table: `core.PersistentVolumeClaim`.
pub fn describe_type(type_name: &str) -> Option<&'static str> {
    TEXTS.get(type_name).copied()
}

/// What a field of a built-in type is for; `apiVersion` and `kind` are the same everywhere.
pub fn describe_field(type_name: &str, field: &str) -> Option<&'static str> {
    match field {
        "apiVersion" => Some("The group and version of the API that the object is written in."),
        "kind" => Some("What kind of object this is."),
        "metadata" => Some("The object's names, labels, owners and versions."),
        _ => TEXTS.get(format!("{type_name}/{field}").as_str()).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::built_in_type;

    #[test]
    fn only_types_and_fields_that_exist_are_described() {
        for place in TEXTS.keys() {
            let (type_name, field) = place.split_once('/').map_or((*place, None), |(t, f)| (t, Some(f)));
            let type_ = built_in_type(type_name).unwrap_or_else(|| panic!("no type {type_name}"));
            assert!(field.is_none_or(|field| type_.field(field).is_some()), "no field {place}");
        }
    }

    #[test]
    fn the_fields_of_a_claim_are_described() {
        let spec = built_in_type("core.PersistentVolumeClaimSpec").unwrap();
        for field in &spec.fields {
            assert!(describe_field(&spec.name, &field.name).is_some(), "{}", field.name);
        }
        assert!(describe_type("core.PersistentVolumeClaim").is_some());
        assert!(describe_field("core.Pod", "kind").is_some());
    }
}
