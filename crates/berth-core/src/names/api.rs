//! Names that only the API itself gives a meaning.

/// The version of tables, metadata and lists of them.
pub const META_V1: &str = "meta.k8s.io/v1";
/// Its predecessor, which old clients still ask for.
pub const META_V1BETA1: &str = "meta.k8s.io/v1beta1";
/// The version of events in their own group.
pub const EVENTS_V1: &str = "events.k8s.io/v1";
/// The version of aggregated discovery.
pub const API_DISCOVERY_V2: &str = "apidiscovery.k8s.io/v2";
/// The version of token requests.
pub const AUTHENTICATION_V1: &str = "authentication.k8s.io/v1";
/// Annotation of the bookmark after a watch's initial events.
pub const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";
/// Annotation: the container that kubectl logs and exec mean if none is named.
pub const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
/// Label of every namespace: its own name.
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
/// Annotation of a pod that mirrors a kubelet's static pod.
pub const MIRROR_POD: &str = "kubernetes.io/config.mirror";
/// Annotation of a volume: its mount options, before there was a field.
pub const BETA_MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";
/// Labels of nodes that say what a node is for begin so.
pub const NODE_ROLE_PREFIX: &str = "node-role.kubernetes.io/";
/// The older label that says what a node is for.
pub const NODE_ROLE: &str = "kubernetes.io/role";
/// Taint of a node that is not ready.
pub const NODE_NOT_READY: &str = "node.kubernetes.io/not-ready";
/// Taint of a node that nobody hears from.
pub const NODE_UNREACHABLE: &str = "node.kubernetes.io/unreachable";
/// Labels of nodes that were renamed: the old name, and the new.
pub const RENAMED_NODE_LABELS: [(&str, &str); 5] = [
    (super::BETA_ZONE, super::ZONE),
    (super::BETA_REGION, super::REGION),
    ("beta.kubernetes.io/os", "kubernetes.io/os"),
    ("beta.kubernetes.io/arch", "kubernetes.io/arch"),
    ("beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type"),
];
/// Where containers find the token of their service account.
pub const SERVICE_ACCOUNT_DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Annotation of a secret with a token: the service account's name.
pub const SERVICE_ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";
/// The type of a secret with a service account's token.
pub const SERVICE_ACCOUNT_TOKEN_SECRET: &str = "kubernetes.io/service-account-token";
/// The type of a secret with a `.dockercfg`.
pub const DOCKERCFG_SECRET: &str = "kubernetes.io/dockercfg";
/// The type of a secret with a `.dockerconfigjson`.
pub const DOCKER_CONFIG_SECRET: &str = "kubernetes.io/dockerconfigjson";
/// The type of a secret with a user name and a password.
pub const BASIC_AUTH_SECRET: &str = "kubernetes.io/basic-auth";
/// The type of a secret with an SSH key.
pub const SSH_AUTH_SECRET: &str = "kubernetes.io/ssh-auth";
/// The type of a secret with a certificate and its key.
pub const TLS_SECRET: &str = "kubernetes.io/tls";
