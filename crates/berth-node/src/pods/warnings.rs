//! Events about the containers of a pod, and what a pod is told once about what is different here: its images, fields that are not
//! honoured, limits that are not kept.
//!
//! Events: `ImageIgnored`, `ImageStandIn`, `FieldsIgnored`, `LimitsNotEnforced`, `MissingClusterDNS`.

use berth_kube::{Severity, reference};
use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Pods, fields, launch, network, resources};

const IMAGE_IGNORED: &str = "Berth runs the command from this machine's files; images are not pulled";

impl Pods {
    /// Emits an event about one container of a pod.
    pub(super) fn emit(
        &self,
        pod: &Pod,
        container: &str,
        severity: Severity,
        reason: &str,
        message: impl Into<String>,
    ) {
        let spec = pod.spec.as_ref();
        let mut init = spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let mut ephemeral = spec.into_iter().flat_map(|spec| spec.ephemeral_containers.iter().flatten());
        let field = if init.any(|other| other.name == container) {
            "initContainers"
        } else if ephemeral.any(|other| other.name == container) {
            "ephemeralContainers"
        } else {
            "containers"
        };
        let mut about = reference(pod);
        about.field_path = Some(format!("spec.{field}{{{container}}}"));
        self.options.recorder.record(about, severity, reason, message);
    }

    /// Emits all of it, for a container that is started for the first time.
    pub(super) fn warn_of_differences(&self, pod: &Pod, container: &Container) {
        match launch::stand_in(&self.options.stand_ins, container) {
            Some(stand_in) => {
                let image = container.image.as_deref().unwrap_or_default();
                let (words, last) = (stand_in.words.join(" "), stand_in.last_words.join(" "));
                let more = if last.is_empty() { String::new() } else { format!(" and {last}") };
                let message = format!(
                    "The image {image} is not pulled: `berth {words}` runs in its place, with the container's \
                     arguments{more}"
                );
                self.emit(pod, &container.name, Severity::Normal, "ImageStandIn", message);
            }
            None if self.options.runtime.images().is_some() => {}
            None => self.emit(pod, &container.name, Severity::Normal, "ImageIgnored", IMAGE_IGNORED),
        }
        self.warn_of_missing_limits(pod, container);
        if network::misses_nameserver(&self.options.network, pod) {
            let message = "nobody here resolves the names of Services, as the resolver does not run; the pod has the \
                           node's name servers";
            self.emit(pod, &container.name, Severity::Warning, "MissingClusterDNS", message);
        }
        self.warn_of_ignored_fields(pod, container);
    }

    /// Names the fields of a container, and with the first also those of the pod, that are not honoured.
    fn warn_of_ignored_fields(&self, pod: &Pod, container: &Container) {
        let has_images = self.options.runtime.images().is_some();
        let mut ignored = fields::ignored_of_container(container, has_images);
        let spec = pod.spec.as_ref();
        let target = spec.and_then(|spec| {
            let mut all = spec.ephemeral_containers.iter().flatten();
            all.find(|one| one.name == container.name)?.target_container_name.as_deref()
        });
        if !has_images && target.is_some_and(|target| !target.is_empty()) {
            ignored.push("targetContainerName".to_owned());
        }
        let message = |ignored: &[String]| format!("This node accepts and ignores: {}", ignored.join(", "));
        if !ignored.is_empty() {
            self.emit(pod, &container.name, Severity::Warning, "FieldsIgnored", message(&ignored));
        }
        let mut all =
            spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        let ignored = fields::ignored_of_pod(pod, has_images);
        if !ignored.is_empty() && all.next().is_some_and(|first| first.name == container.name) {
            self.options.recorder.record(
                reference(pod),
                Severity::Warning,
                "FieldsIgnored",
                message(&ignored),
            );
        }
    }

    /// Says, once for each pod, that limits are not kept where the machine cannot do that.
    fn warn_of_missing_limits(&self, pod: &Pod, container: &Container) {
        let Err(why) = self.options.runtime.limits_containers() else { return };
        let spec = pod.spec.as_ref();
        let mut all =
            spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        if all
            .find(|container| resources::is_limited(container))
            .is_some_and(|first| first.name == container.name)
        {
            let message = format!("resources.limits of cpu and memory are not enforced: {why}");
            self.options.recorder.record(reference(pod), Severity::Warning, "LimitsNotEnforced", message);
        }
    }
}
