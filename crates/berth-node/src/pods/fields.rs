//! Every field that a pod or container can have, and what this node does about it: none is ignored without a word.
//!
//! A test compares the table with the fields of Kubernetes, so that a new field needs a row here.

use k8s_openapi::api::core::v1::{Container, Pod};
use serde_json::Value;

use self::Treatment::{Honoured, Ignored, IgnoredByCri, IgnoredByProcesses, NoEffect, Refused};

/// What is done about a field.
#[derive(Debug, Clone, Copy)]
enum Treatment {
    /// The node, the scheduler or the API server does what it says.
    Honoured,
    /// It can be set to nothing that would make a difference here, for this reason.
    NoEffect(#[expect(dead_code, reason = "for whoever reads the table")] &'static str),
    /// A container that asks for what is not there is not started, and an event says why.
    Refused,
    /// The event `FieldsIgnored` names it if its value asks for something that does not happen.
    Ignored(fn(&Value) -> bool),
    /// As `Ignored`, unless a container runtime with images runs the pod.
    IgnoredByProcesses(fn(&Value) -> bool),
    /// As `Ignored`, if such a runtime runs the pod.
    IgnoredByCri(fn(&Value) -> bool),
}

/// The fields of one type, each with what is done about it. Fields of the types within have a table of their own.
struct Fields {
    /// The type's name in Kubernetes.
    #[cfg_attr(not(test), expect(dead_code, reason = "the test that compares names the type by it"))]
    kind: &'static str,
    rows: &'static [(&'static str, Treatment)],
}

const IMAGE: Treatment = NoEffect("processes have no image, which the event ImageIgnored says");
const TEMPLATE: Treatment = NoEffect("what is within has rows of its own");

const POD: Fields = Fields {
    kind: "PodSpec",
    rows: &[
        ("activeDeadlineSeconds", Honoured),
        ("affinity", Honoured),
        ("automountServiceAccountToken", Honoured),
        ("containers", Honoured),
        ("dnsConfig", Honoured),
        ("dnsPolicy", Honoured),
        ("enableServiceLinks", Honoured),
        ("ephemeralContainers", Honoured),
        ("hostAliases", Honoured),
        ("hostIPC", IgnoredByProcesses(is_true)),
        ("hostNetwork", Honoured),
        ("hostPID", IgnoredByProcesses(is_true)),
        ("hostUsers", Honoured),
        // A pod with the network of the machine has its name, too.
        ("hostname", IgnoredByCri(is_something)),
        ("hostnameOverride", Ignored(is_something)),
        ("imagePullSecrets", IMAGE),
        ("initContainers", Honoured),
        ("nodeName", Honoured),
        ("nodeSelector", Honoured),
        ("os", Ignored(is_other_system)),
        ("overhead", Honoured),
        ("preemptionPolicy", Honoured),
        ("priority", Honoured),
        ("priorityClassName", Honoured),
        ("readinessGates", Honoured),
        ("resourceClaims", Ignored(is_something)),
        ("resources", Honoured),
        ("restartPolicy", Honoured),
        ("runtimeClassName", Ignored(is_something)),
        ("schedulerName", Honoured),
        ("schedulingGates", Honoured),
        ("schedulingGroup", Ignored(is_something)),
        ("securityContext", TEMPLATE),
        ("serviceAccount", Honoured),
        ("serviceAccountName", Honoured),
        ("setHostnameAsFQDN", IgnoredByCri(is_true)),
        ("shareProcessNamespace", IgnoredByProcesses(is_true)),
        ("subdomain", Honoured),
        ("terminationGracePeriodSeconds", Honoured),
        ("tolerations", Honoured),
        ("topologySpreadConstraints", Honoured),
        ("volumes", Honoured),
    ],
};

const POD_SECURITY: Fields = Fields {
    kind: "PodSecurityContext",
    rows: &[
        ("appArmorProfile", Refused),
        ("fsGroup", Honoured),
        ("fsGroupChangePolicy", Honoured),
        ("runAsGroup", Honoured),
        ("runAsNonRoot", Honoured),
        ("runAsUser", Honoured),
        ("seLinuxChangePolicy", NoEffect("volumes are not relabelled, which is said of seLinuxOptions")),
        ("seLinuxOptions", Ignored(is_something)),
        ("seccompProfile", Honoured),
        ("supplementalGroups", Honoured),
        ("supplementalGroupsPolicy", Honoured),
        ("sysctls", IgnoredByProcesses(is_something)),
        ("windowsOptions", Ignored(is_something)),
    ],
};

const CONTAINER: Fields = Fields {
    kind: "Container",
    rows: &[
        ("args", Honoured),
        ("command", Honoured),
        ("env", Honoured),
        ("envFrom", Honoured),
        ("image", IMAGE),
        ("imagePullPolicy", IMAGE),
        ("lifecycle", TEMPLATE),
        ("livenessProbe", Honoured),
        ("name", Honoured),
        ("ports", Ignored(has_other_host_port)),
        ("readinessProbe", Honoured),
        ("resizePolicy", NoEffect("resources do not change while a pod runs")),
        ("resources", TEMPLATE),
        ("restartPolicy", Honoured),
        ("restartPolicyRules", Ignored(is_something)),
        ("securityContext", TEMPLATE),
        ("startupProbe", Honoured),
        ("stdin", Honoured),
        ("stdinOnce", Honoured),
        // Of ephemeral containers alone.
        ("targetContainerName", IgnoredByProcesses(is_something)),
        ("terminationMessagePath", Honoured),
        ("terminationMessagePolicy", Honoured),
        ("tty", Honoured),
        ("volumeDevices", Honoured),
        ("volumeMounts", Honoured),
        ("workingDir", Honoured),
    ],
};

const LIFECYCLE: Fields = Fields {
    kind: "Lifecycle",
    rows: &[("postStart", Honoured), ("preStop", Honoured), ("stopSignal", Ignored(is_something))],
};

const RESOURCES: Fields = Fields {
    kind: "ResourceRequirements",
    rows: &[("claims", Ignored(is_something)), ("limits", Ignored(has_huge_pages)), ("requests", Honoured)],
};

const SECURITY: Fields = Fields {
    kind: "SecurityContext",
    rows: &[
        ("allowPrivilegeEscalation", Honoured),
        ("appArmorProfile", Refused),
        ("capabilities", Honoured),
        ("privileged", Honoured),
        ("procMount", Honoured),
        ("readOnlyRootFilesystem", Honoured),
        ("runAsGroup", Honoured),
        ("runAsNonRoot", Honoured),
        ("runAsUser", Honoured),
        ("seLinuxOptions", Ignored(is_something)),
        ("seccompProfile", Honoured),
        ("windowsOptions", Ignored(is_something)),
    ],
};

/// The fields that a pod sets for all of its containers, and that this node does not honour.
pub(super) fn ignored_of_pod(pod: &Pod, has_images: bool) -> Vec<String> {
    let spec = serde_json::to_value(pod.spec.as_ref()).unwrap_or_default();
    let mut ignored = ignored(&POD, &spec, "", has_images);
    ignored.extend(self::ignored(&POD_SECURITY, &spec["securityContext"], "securityContext.", has_images));
    ignored
}

/// The fields that a container sets and this node does not honour.
pub(super) fn ignored_of_container(container: &Container, has_images: bool) -> Vec<String> {
    let container = serde_json::to_value(container).unwrap_or_default();
    let mut ignored = ignored(&CONTAINER, &container, "", has_images);
    for (fields, field) in
        [(&LIFECYCLE, "lifecycle"), (&RESOURCES, "resources"), (&SECURITY, "securityContext")]
    {
        ignored.extend(self::ignored(fields, &container[field], &format!("{field}."), has_images));
    }
    ignored
}

fn ignored(fields: &Fields, value: &Value, prefix: &str, has_images: bool) -> Vec<String> {
    let asks = |(field, treatment): &&(&str, Treatment)| match treatment {
        Ignored(asks) => value.get(field).is_some_and(asks),
        IgnoredByProcesses(asks) => !has_images && value.get(field).is_some_and(asks),
        IgnoredByCri(asks) => has_images && value.get(field).is_some_and(asks),
        Honoured | NoEffect(_) | Refused => false,
    };
    fields.rows.iter().filter(asks).map(|(field, _)| format!("{prefix}{field}")).collect()
}

fn is_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    }
}

fn is_true(value: &Value) -> bool {
    value == &Value::Bool(true)
}

fn is_other_system(value: &Value) -> bool {
    value.get("name").is_some_and(|name| name != "linux")
}

/// A port of a container is one of the machine, of the same number.
fn has_other_host_port(value: &Value) -> bool {
    let is_other = |port: &Value| {
        port.get("hostPort").is_some_and(|host| *host != 0 && Some(host) != port.get("containerPort"))
    };
    value.as_array().is_some_and(|ports| ports.iter().any(is_other))
}

fn has_huge_pages(value: &Value) -> bool {
    value.as_object().is_some_and(|limits| limits.keys().any(|name| name.starts_with("hugepages-")))
}

#[cfg(test)]
mod tests;
