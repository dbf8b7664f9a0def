// Command generate writes src/schema/kubernetes.types: what fields the built-in kinds have.
//
// The facts come from the published Go types (JSON names, protobuf numbers, presence, merge keys) and from the
// published OpenAPI documents (list and map types, required fields). Usage: go run . OPENAPI_SPEC_DIRECTORY
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// kinds are the served kinds, by group and version; whatever they refer to follows.
var kinds = []struct {
	groupVersion string
	objects      []any
}{
	{"v1", []any{
		corev1.Namespace{}, corev1.Node{}, corev1.Pod{}, corev1.Binding{}, corev1.PersistentVolume{},
		corev1.PersistentVolumeClaim{}, corev1.ConfigMap{}, corev1.Secret{}, corev1.ServiceAccount{},
		corev1.Event{}, corev1.Service{}, corev1.Endpoints{}, corev1.LimitRange{}, corev1.ResourceQuota{},
	}},
	{"events.k8s.io/v1", []any{eventsv1.Event{}}},
	{"discovery.k8s.io/v1", []any{discoveryv1.EndpointSlice{}}},
	{"storage.k8s.io/v1", []any{
		storagev1.StorageClass{}, storagev1.CSIDriver{}, storagev1.CSINode{}, storagev1.VolumeAttachment{},
		storagev1.CSIStorageCapacity{}, storagev1.VolumeAttributesClass{},
	}},
	{"coordination.k8s.io/v1", []any{coordinationv1.Lease{}}},
	{"apps/v1", []any{
		appsv1.StatefulSet{}, appsv1.Deployment{}, appsv1.DaemonSet{}, appsv1.ReplicaSet{},
		appsv1.ControllerRevision{},
	}},
	{"batch/v1", []any{batchv1.Job{}, batchv1.CronJob{}}},
	{"rbac.authorization.k8s.io/v1", []any{
		rbacv1.Role{}, rbacv1.RoleBinding{}, rbacv1.ClusterRole{}, rbacv1.ClusterRoleBinding{},
	}},
	{"apiextensions.k8s.io/v1", []any{apiextensionsv1.CustomResourceDefinition{}}},
	{"authentication.k8s.io/v1", []any{
		authenticationv1.TokenReview{}, authenticationv1.TokenRequest{}, authenticationv1.SelfSubjectReview{},
	}},
	{"authorization.k8s.io/v1", []any{
		authorizationv1.SelfSubjectAccessReview{}, authorizationv1.SubjectAccessReview{},
		authorizationv1.LocalSubjectAccessReview{}, authorizationv1.SelfSubjectRulesReview{},
	}},
	{"autoscaling/v1", []any{autoscalingv1.Scale{}}},
	{"policy/v1", []any{policyv1.Eviction{}, policyv1.PodDisruptionBudget{}}},
	{"scheduling.k8s.io/v1", []any{schedulingv1.PriorityClass{}}},
	{"meta.k8s.io/v1", []any{
		metav1.Status{}, metav1.DeleteOptions{}, metav1.CreateOptions{}, metav1.UpdateOptions{}, metav1.PatchOptions{},
		metav1.WatchEvent{}, metav1.PartialObjectMetadata{},
	}},
}

// special are the types whose JSON form is not the plain one.
var special = map[reflect.Type]string{
	reflect.TypeFor[resource.Quantity]():                            "quantity",
	reflect.TypeFor[metav1.Time]():                                  "time",
	reflect.TypeFor[metav1.MicroTime]():                             "microtime",
	reflect.TypeFor[metav1.Duration]():                              "duration",
	reflect.TypeFor[intstr.IntOrString]():                           "intOrString",
	reflect.TypeFor[runtime.RawExtension]():                         "rawExtension",
	reflect.TypeFor[metav1.FieldsV1]():                              "fields",
	reflect.TypeFor[apiextensionsv1.JSON]():                         "json",
	reflect.TypeFor[apiextensionsv1.JSONSchemaPropsOrArray]():       "schemaOrArray",
	reflect.TypeFor[apiextensionsv1.JSONSchemaPropsOrBool]():        "schemaOrBool",
	reflect.TypeFor[apiextensionsv1.JSONSchemaPropsOrStringArray](): "schemaOrStrings",
	reflect.TypeFor[[]byte]():                                       "bytes",
}

// packages maps a Go import path to the short prefix of its types' names.
var packages = map[string]string{
	"k8s.io/apimachinery/pkg/apis/meta/v1":                     "meta",
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1": "apiextensions",
}

type schema struct {
	Properties map[string]*schema `json:"properties"`
	Required   []string           `json:"required"`
	Default    any                `json:"default"`
	ListType   string             `json:"x-kubernetes-list-type"`
	ListKeys   []string           `json:"x-kubernetes-list-map-keys"`
	MapType    string             `json:"x-kubernetes-map-type"`
	MergeKey   string             `json:"x-kubernetes-patch-merge-key"`
	Strategy   string             `json:"x-kubernetes-patch-strategy"`
}

var (
	definitions = map[string]*schema{}
	pending     []reflect.Type
	seen        = map[reflect.Type]bool{}
	keys        = map[reflect.Type][]string{}
	// inlined holds, for types that are published only as a part of another, that other.
	inlined = map[reflect.Type]*schema{}
)

func main() {
	if len(os.Args) != 2 {
		fail("usage: go run . OPENAPI_SPEC_DIRECTORY")
	}
	readDefinitions(os.Args[1])
	blocks := []string{}
	for _, group := range kinds {
		for _, object := range group.objects {
			visit(reflect.TypeOf(object))
			blocks = append(blocks, fmt.Sprintf("kind %s %s %s\n",
				group.groupVersion, reflect.TypeOf(object).Name(), name(reflect.TypeOf(object))))
		}
	}
	for i := 0; i < len(pending); i++ {
		describe(pending[i])
	}
	// Once more, now that all keys of lists are known: only their defaults are of interest.
	types := []string{}
	for _, t := range pending {
		types = append(types, describe(t))
	}
	slices.Sort(types)
	fmt.Print(header)
	fmt.Print(strings.Join(blocks, ""), "\n", strings.Join(types, "\n"))
}

const header = `# The fields of the built-in kinds: made by generate/, checked by tests/server/kubernetes.rs.
#
# kind GROUP/VERSION KIND TYPE, then one block per type: "type NAME [atomic]" and one line per field:
#   JSON-NAME PROTOBUF-NUMBER SHAPE [FLAG...]
# SHAPE: string int32 int64 bool double float bytes quantity time microtime duration intOrString rawExtension fields
#   json schemaOrArray schemaOrBool schemaOrStrings, a type's name, []SHAPE, map:SHAPE; items:SHAPE is a list that
#   protobuf wraps in a message.
# FLAGS: pointer (absent and empty differ), always (JSON has it even when empty), required,
#   list=atomic|set|map:KEY,KEY..., atomic (an object or map changed as a whole), granular (of an atomic type, and not),
#   patch=merge|merge:KEY|replace|retainKeys|..., default=VALUE (of a list's key), inline (its fields stand in this one).

`

func readDefinitions(directory string) {
	files, err := filepath.Glob(filepath.Join(directory, "v3", "*_openapi.json"))
	if err != nil || len(files) == 0 {
		fail("no OpenAPI documents in " + directory)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			fail(err.Error())
		}
		var document struct {
			Components struct {
				Schemas map[string]*schema `json:"schemas"`
			} `json:"components"`
		}
		if err := json.Unmarshal(text, &document); err != nil {
			fail(file + ": " + err.Error())
		}
		for name, definition := range document.Components.Schemas {
			definitions[name] = definition
		}
	}
}

func visit(t reflect.Type) {
	if !seen[t] {
		seen[t] = true
		pending = append(pending, t)
	}
}

func name(t reflect.Type) string {
	prefix, found := packages[t.PkgPath()]
	if !found {
		prefix = strings.TrimSuffix(strings.TrimPrefix(t.PkgPath(), "k8s.io/api/"), "/v1")
	}
	return prefix + "." + t.Name()
}

func definition(t reflect.Type) *schema {
	path := strings.Split(t.PkgPath(), "/")
	hosts := strings.Split(path[0], ".")
	slices.Reverse(hosts)
	full := strings.Join(append(hosts, path[1:]...), ".") + "." + t.Name()
	if found := definitions[full]; found != nil {
		return found
	}
	if whole := inlined[t]; whole != nil {
		return whole
	}
	return &schema{}
}

func describe(t reflect.Type) string {
	published := definition(t)
	text := "type " + name(t)
	if published.MapType == "atomic" {
		text += " atomic"
	}
	text += "\n"
	for i := range t.NumField() {
		text += line(t, t.Field(i), published)
	}
	return text
}

func line(owner reflect.Type, field reflect.StructField, published *schema) string {
	tag := strings.Split(field.Tag.Get("json"), ",")
	if tag[0] == "-" || field.Type == reflect.TypeFor[metav1.TypeMeta]() || !field.IsExported() {
		return ""
	}
	inline := tag[0] == "" && field.Anonymous
	jsonName := tag[0]
	if inline {
		jsonName = field.Name
	} else if jsonName == "" {
		fail(owner.String() + "." + field.Name + " has no JSON name")
	}
	words := []string{jsonName, number(owner, field), shape(field.Type)}
	if field.Type.Kind() == reflect.Pointer {
		words = append(words, "pointer")
	}
	if inline {
		inlined[field.Type] = published
		return "  " + strings.Join(append(words, "inline"), " ") + "\n"
	}
	// Of a struct, omitempty means nothing: only omitzero leaves it out.
	isStruct := field.Type.Kind() == reflect.Struct
	if !slices.Contains(tag, "omitzero") && (isStruct || !slices.Contains(tag, "omitempty")) {
		words = append(words, "always")
	}
	if slices.Contains(published.Required, jsonName) {
		words = append(words, "required")
	}
	words = append(words, structure(field, published.Properties[jsonName])...)
	if property := published.Properties[jsonName]; property != nil && slices.Contains(keys[owner], jsonName) {
		switch value := property.Default.(type) {
		case string, float64:
			words = append(words, fmt.Sprintf("default=%v", value))
		}
	}
	return "  " + strings.Join(words, " ") + "\n"
}

func structure(field reflect.StructField, property *schema) []string {
	words := []string{}
	if property == nil {
		property = &schema{}
	}
	if property.ListType == "map" {
		words = append(words, "list=map:"+strings.Join(property.ListKeys, ","))
		keys[field.Type.Elem()] = append(keys[field.Type.Elem()], property.ListKeys...)
	} else if property.ListType != "" {
		words = append(words, "list="+property.ListType)
	}
	if property.MapType == "atomic" {
		words = append(words, "atomic")
	} else if property.MapType == "granular" && field.Type.Kind() != reflect.Map {
		words = append(words, "granular")
	}
	strategy, key := field.Tag.Get("patchStrategy"), field.Tag.Get("patchMergeKey")
	if property.Strategy != "" && (property.Strategy != strategy || property.MergeKey != key) {
		fail(field.Name + ": OpenAPI and Go differ on the patch strategy")
	}
	if strategy != "" {
		if key != "" {
			strategy += ":" + key
		}
		words = append(words, "patch="+strategy)
	}
	return words
}

func number(owner reflect.Type, field reflect.StructField) string {
	parts := strings.Split(field.Tag.Get("protobuf"), ",")
	if len(parts) > 1 {
		return parts[1]
	}
	if owner == reflect.TypeFor[metav1.PartialObjectMetadata]() || field.Anonymous {
		return "0"
	}
	fail(owner.String() + "." + field.Name + " has no protobuf number")
	return ""
}

func shape(t reflect.Type) string {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if found, ok := special[t]; ok {
		return found
	}
	switch t.Kind() {
	case reflect.String:
		return "string"
	case reflect.Int32, reflect.Int64, reflect.Bool:
		return t.Kind().String()
	case reflect.Uint8, reflect.Int:
		return "int32"
	case reflect.Float64:
		return "double"
	case reflect.Float32:
		return "float"
	case reflect.Slice:
		// Named slices of strings that are not plain lists have a message of their own.
		if t.Name() == "ExtraValue" || t.Name() == "Verbs" {
			return "items:" + shape(t.Elem())
		}
		return "[]" + shape(t.Elem())
	case reflect.Map:
		return "map:" + shape(t.Elem())
	case reflect.Struct:
		visit(t)
		return name(t)
	}
	fail("no shape for " + t.String())
	return ""
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, "generate: "+message)
	os.Exit(1)
}
