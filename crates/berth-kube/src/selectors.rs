//! Selectors: which labels, nodes and topologies match what an object asks for.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume, TopologySelectorTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

const NONE: &Labels = &Labels::new();

/// An object's labels, empty if it has none.
pub fn labels(labels: Option<&Labels>) -> &Labels {
    labels.unwrap_or(NONE)
}

/// Whether a label selector chooses an object with these labels; an empty one chooses everything, an invalid one nothing.
pub fn label_selector(selector: &LabelSelector, labels: &Labels) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    equal
        && selector.match_expressions.iter().flatten().all(|expression| {
            let values = expression.values.as_deref().unwrap_or_default();
            requirement(&expression.operator, values, labels.get(&expression.key))
        })
}

/// Whether a label selector asks for nothing at all.
pub fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty)
        && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
}

/// Whether one term of a node selector chooses the node; a selector without terms chooses none.
pub fn node_selector(selector: &NodeSelector, node: &str, labels: &Labels) -> bool {
    selector.node_selector_terms.iter().any(|term| node_term(term, node, labels))
}

/// Whether all of a term chooses the node; an empty term chooses none.
pub fn node_term(term: &NodeSelectorTerm, node: &str, labels: &Labels) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let matches = |asked: &NodeSelectorRequirement, value: Option<&String>| {
        requirement(&asked.operator, asked.values.as_deref().unwrap_or_default(), value)
    };
    let name = node.to_owned();
    expressions.iter().all(|asked| matches(asked, labels.get(&asked.key)))
        && fields.iter().all(|asked| asked.key == "metadata.name" && matches(asked, Some(&name)))
}

/// Whether a volume may be used on a node: by its node affinity, if it has one.
pub fn volume_on_node(volume: &PersistentVolume, node: &Node) -> bool {
    let required = volume
        .spec
        .as_ref()
        .and_then(|spec| spec.node_affinity.as_ref())
        .and_then(|affinity| affinity.required.as_ref());
    // A volume's affinity speaks of labels only.
    required.is_none_or(|required| node_selector(required, "", labels(node.metadata.labels.as_ref())))
}

/// Whether a class may make volumes for a node; no terms allow every node, an empty term allows none.
pub fn topology(terms: &[TopologySelectorTerm], labels: &Labels) -> bool {
    terms.is_empty()
        || terms.iter().any(|term| {
            let asked = term.match_label_expressions.as_deref().unwrap_or_default();
            !asked.is_empty()
                && asked
                    .iter()
                    .all(|asked| labels.get(&asked.key).is_some_and(|value| asked.values.contains(value)))
        })
}

fn requirement(operator: &str, values: &[String], value: Option<&String>) -> bool {
    let number = |text: &String| text.parse::<i64>().ok();
    let compare = |with: fn(&i64, &i64) -> bool| {
        let [bound] = values else { return false };
        value.and_then(number).zip(number(bound)).is_some_and(|(value, bound)| with(&value, &bound))
    };
    match operator {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(i64::gt),
        "Lt" => compare(i64::lt),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_judge_a_label_as_kubernetes_does() {
        let values = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        for (operator, asked, value, expected) in [
            ("In", "a,b", Some("b"), true),
            ("In", "a,b", Some("c"), false),
            ("In", "a", None, false),
            ("NotIn", "a", None, true),
            ("NotIn", "a", Some("a"), false),
            ("Exists", "", Some(""), true),
            ("Exists", "", None, false),
            ("DoesNotExist", "", None, true),
            ("DoesNotExist", "", Some("x"), false),
            ("Gt", "3", Some("4"), true),
            ("Gt", "3", Some("3"), false),
            ("Lt", "3", Some("2"), true),
            ("Lt", "3", Some("x"), false),
            ("Like", "a", Some("a"), false),
        ] {
            let value = value.map(str::to_owned);
            assert_eq!(
                requirement(operator, &values(asked), value.as_ref()),
                expected,
                "{operator} {asked} {value:?}"
            );
        }
    }

    #[test]
    fn empty_terms_choose_no_node_and_no_terms_of_a_class_choose_all() {
        let empty = NodeSelectorTerm::default();
        assert!(!node_term(&empty, "n", NONE));
        assert!(!node_selector(&NodeSelector::default(), "n", NONE));
        assert!(topology(&[], NONE));
        assert!(!topology(&[TopologySelectorTerm::default()], NONE));
    }
}
