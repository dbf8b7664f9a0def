//! What a class's parameters may ask of a claim: `${pvc.metadata.labels['KEY']}` and `${pvc.metadata.annotations['KEY']}`.
//!
//! The provisioner, who knows the claim, and the driver, who fills the template in, read it by the same rule, and meet
//! in the parameter that carries the value.

use crate::names::KUBERNETES_PARAMETER_PREFIX;

/// A label or an annotation of a claim, by its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimField<'a> {
    /// The label of that key.
    Label(&'a str),
    /// The annotation of that key.
    Annotation(&'a str),
}

impl<'a> ClaimField<'a> {
    /// Reads what stands between `${` and `}`; nothing if it is something else.
    pub fn parse(variable: &'a str) -> Option<Self> {
        let field = variable.trim().strip_prefix("pvc.metadata.")?;
        let label = field.strip_prefix("labels").and_then(index).map(Self::Label);
        label.or_else(|| field.strip_prefix("annotations").and_then(index).map(Self::Annotation))
    }

    /// All that a template asks for.
    pub fn in_template(template: &'a str) -> impl Iterator<Item = Self> {
        let variables = template.split("${").skip(1);
        variables.filter_map(|rest| Self::parse(rest.split_once('}')?.0))
    }

    /// The key of the parameter in which the provisioner sends its value.
    pub fn parameter(self) -> String {
        match self {
            Self::Label(key) => format!("{KUBERNETES_PARAMETER_PREFIX}pvc/labels/{key}"),
            Self::Annotation(key) => format!("{KUBERNETES_PARAMETER_PREFIX}pvc/annotations/{key}"),
        }
    }

    /// Whether a parameter has the value of one.
    pub fn is_parameter(key: &str) -> bool {
        let own = key.strip_prefix(KUBERNETES_PARAMETER_PREFIX).unwrap_or_default();
        own.starts_with("pvc/labels/") || own.starts_with("pvc/annotations/")
    }
}

/// The key in `['key']` or `["key"]`.
fn index(text: &str) -> Option<&str> {
    let index = text.strip_prefix('[')?.strip_suffix(']')?;
    let quoted = |quote: char| index.strip_prefix(quote)?.strip_suffix(quote);
    quoted('\'').or_else(|| quoted('"')).filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_asks_for_labels_and_annotations_by_their_keys() {
        let asked = |template| ClaimField::in_template(template).collect::<Vec<_>>();
        assert_eq!(
            asked("a/${pvc.metadata.labels['app.kubernetes.io/name']}-${ pvc.metadata.annotations[\"x\"] }"),
            [ClaimField::Label("app.kubernetes.io/name"), ClaimField::Annotation("x")]
        );
        for nothing in [
            "",
            "plain",
            "${pvc.metadata.name}",
            "${pvc.metadata.labels[app]}",
            "${pvc.metadata.labels['']}",
            "${pvc.metadata.labels['app'}",
            "${pvc.metadata.labels['app']",
            "${pv.metadata.labels['app']}",
        ] {
            assert_eq!(asked(nothing), [], "{nothing}");
        }
    }

    #[test]
    fn the_parameter_of_a_field_is_known_again() {
        for field in [ClaimField::Label("a/b"), ClaimField::Annotation("c")] {
            assert!(ClaimField::is_parameter(&field.parameter()), "{field:?}");
        }
        assert_eq!(ClaimField::Label("app").parameter(), "csi.storage.k8s.io/pvc/labels/app");
        assert_eq!(ClaimField::Annotation("x/y").parameter(), "csi.storage.k8s.io/pvc/annotations/x/y");
        for other in ["csi.storage.k8s.io/pvc/name", "pvc/labels/app", "subDir"] {
            assert!(!ClaimField::is_parameter(other), "{other}");
        }
    }
}
