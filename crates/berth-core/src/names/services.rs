//! Labels and annotations of Services and of the objects that hold their endpoints.

/// On an EndpointSlice: the name of its Service.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// On an EndpointSlice: who keeps it.
pub const ENDPOINT_SLICE_MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Who keeps the slices of the pods that a Service selects.
pub const ENDPOINT_SLICE_CONTROLLER: &str = "endpointslice-controller.k8s.io";
/// Who keeps the slices that repeat Endpoints which somebody wrote.
pub const ENDPOINT_SLICE_MIRRORING_CONTROLLER: &str = "endpointslicemirroring-controller.k8s.io";
/// On Endpoints: who keeps them.
pub const ENDPOINTS_MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
/// On Endpoints and slices: their Service has no address of its own.
pub const HEADLESS_SERVICE: &str = "service.kubernetes.io/headless";
/// On Endpoints: they are not repeated by slices.
pub const SKIP_MIRROR: &str = "endpointslice.kubernetes.io/skip-mirror";
/// On Endpoints: they do not hold all addresses.
pub const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
/// On a Service of the cluster itself: its name for people.
pub const CLUSTER_SERVICE_NAME: &str = "kubernetes.io/name";
