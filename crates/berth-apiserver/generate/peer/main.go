// Command peer answers the tests' questions with Kubernetes' own libraries: what do the Go types make of this object,
// what does this patch do, who owns these fields. One JSON request per line on standard input, one answer per line.
// Usage: go run ./peer OPENAPI_SPEC_DIRECTORY
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/managedfields/managedfieldstest"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/kube-openapi/pkg/validation/spec"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/randfill"
)

type request struct {
	Op       string          `json:"op"`
	Group    string          `json:"group"`
	Version  string          `json:"version"`
	Kind     string          `json:"kind"`
	Seed     int64           `json:"seed"`
	Text     string          `json:"text"`
	Object   json.RawMessage `json:"object"`
	Patch    json.RawMessage `json:"patch"`
	Protobuf []byte          `json:"protobuf"`
	Manager  string          `json:"manager"`
	Force    bool            `json:"force"`
}

type answer struct {
	Object   json.RawMessage `json:"object,omitempty"`
	Protobuf []byte          `json:"protobuf,omitempty"`
	Text     string          `json:"text,omitempty"`
	Strict   []string        `json:"strict,omitempty"`
	Error    string          `json:"error,omitempty"`
}

var (
	scheme     = runtime.NewScheme()
	converter  managedfields.TypeConverter
	serializer *protobuf.Serializer
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: peer OPENAPI_SPEC_DIRECTORY")
		os.Exit(1)
	}
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme, storagev1.AddToScheme, coordinationv1.AddToScheme,
		discoveryv1.AddToScheme, eventsv1.AddToScheme, rbacv1.AddToScheme, authenticationv1.AddToScheme, authorizationv1.AddToScheme,
		autoscalingv1.AddToScheme, policyv1.AddToScheme, schedulingv1.AddToScheme, apiextensionsv1.AddToScheme,
	} {
		must(add(scheme))
	}
	meta := schema.GroupVersion{Group: "meta.k8s.io", Version: "v1"}
	scheme.AddKnownTypes(meta, &metav1.Status{}, &metav1.DeleteOptions{}, &metav1.CreateOptions{},
		&metav1.UpdateOptions{}, &metav1.PatchOptions{})
	serializer = protobuf.NewSerializer(scheme, scheme)
	converter = readConverter(os.Args[1])
	input := bufio.NewReader(os.Stdin)
	output := json.NewEncoder(os.Stdout)
	output.SetEscapeHTML(false)
	for {
		line, err := input.ReadBytes('\n')
		if err != nil {
			return
		}
		var asked request
		must(json.Unmarshal(line, &asked))
		must(output.Encode(reply(asked)))
	}
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		os.Exit(1)
	}
}

func readConverter(directory string) managedfields.TypeConverter {
	files, err := filepath.Glob(filepath.Join(directory, "v3", "*_openapi.json"))
	must(err)
	definitions := map[string]*spec.Schema{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(err)
		var document struct {
			Components struct {
				Schemas map[string]*spec.Schema `json:"schemas"`
			} `json:"components"`
		}
		must(json.Unmarshal(text, &document))
		for name, definition := range document.Components.Schemas {
			definitions[name] = definition
		}
	}
	result, err := managedfields.NewTypeConverter(definitions, false)
	must(err)
	return result
}

func reply(asked request) (result answer) {
	defer func() {
		if failure := recover(); failure != nil {
			result = answer{Error: fmt.Sprint("panic: ", failure)}
		}
	}()
	object, err := answers[asked.Op](asked)
	if err != nil {
		object.Error = err.Error()
	}
	return object
}

var answers = map[string]func(request) (answer, error){
	"fill":      fill,
	"decode":    decode,
	"encode":    encode,
	"normalize": normalize,
	"strategic": strategic,
	"json":      jsonPatch,
	"merge":     mergePatch,
	"quantity":  quantity,
	"apply":     apply,
	"custom":    custom,
	"update":    update,
}

func (asked request) gvk() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: asked.Group, Version: asked.Version, Kind: asked.Kind}
}

func (asked request) typed() (runtime.Object, error) {
	return scheme.New(asked.gvk())
}

func written(object runtime.Object) (answer, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return answer{}, err
	}
	var buffer bytes.Buffer
	if err := serializer.Encode(object, &buffer); err != nil {
		return answer{}, err
	}
	return answer{Object: text, Protobuf: buffer.Bytes()}, nil
}

// fill makes an object with something in all its fields.
func fill(asked request) (answer, error) {
	object, err := asked.typed()
	if err != nil {
		return answer{}, err
	}
	filler := randfill.NewWithSeed(asked.Seed).NilChance(.4).NumElements(1, 2).MaxDepth(8).Funcs(
		func(t *metav1.TypeMeta, c randfill.Continue) {},
		func(t *metav1.Time, c randfill.Continue) { t.Time = time.Unix(c.Int63n(2e9), 0).UTC() },
		func(t *metav1.MicroTime, c randfill.Continue) {
			t.Time = time.Unix(c.Int63n(2e9), c.Int63n(1e6)*1000).UTC()
		},
		func(q *resource.Quantity, c randfill.Continue) {
			// Parsed, because a quantity remembers how it was written, and its text alone does not say that.
			*q = resource.MustParse(resource.NewQuantity(c.Int63n(1<<40), resource.BinarySI).String())
		},
		func(v *intstr.IntOrString, c randfill.Continue) {
			if c.Bool() {
				*v = intstr.FromInt32(c.Int31())
			} else {
				*v = intstr.FromString(c.String(5))
			}
		},
		func(r *runtime.RawExtension, c randfill.Continue) { r.Raw = []byte(`{"a":{"b":[1,"x",null]}}`) },
		func(f *metav1.FieldsV1, c randfill.Continue) { f.Raw = []byte(`{"f:spec":{".":{},"f:x":{}}}`) },
		func(j *apiextensionsv1.JSON, c randfill.Continue) { j.Raw = []byte(`{"d":[true,1.5]}`) },
		func(s *apiextensionsv1.JSONSchemaPropsOrArray, c randfill.Continue) {
			s.Schema = &apiextensionsv1.JSONSchemaProps{Type: "string"}
		},
		func(s *apiextensionsv1.JSONSchemaPropsOrBool, c randfill.Continue) {
			if s.Allows = c.Bool(); s.Allows {
				s.Schema = &apiextensionsv1.JSONSchemaProps{Type: "object"}
			}
		},
		func(s *apiextensionsv1.JSONSchemaPropsOrStringArray, c randfill.Continue) {
			s.Property = []string{"a", "b"}
		},
	)
	filler.Fill(object)
	object.GetObjectKind().SetGroupVersionKind(asked.gvk())
	return written(object)
}

func decode(asked request) (answer, error) {
	object, _, err := serializer.Decode(asked.Protobuf, nil, nil)
	if err != nil {
		return answer{}, err
	}
	object.GetObjectKind().SetGroupVersionKind(asked.gvk())
	return written(object)
}

func encode(asked request) (answer, error) {
	object, err := asked.typed()
	if err != nil {
		return answer{}, err
	}
	if err := json.Unmarshal(asked.Object, object); err != nil {
		return answer{}, err
	}
	object.GetObjectKind().SetGroupVersionKind(asked.gvk())
	return written(object)
}

// normalize reads an object strictly and writes it again.
func normalize(asked request) (answer, error) {
	object, err := asked.typed()
	if err != nil {
		return answer{}, err
	}
	strict, err := kjson.UnmarshalStrict([]byte(asked.Text), object)
	if err != nil {
		return answer{}, err
	}
	result, err := written(object)
	for _, problem := range strict {
		result.Strict = append(result.Strict, problem.Error())
	}
	return result, err
}

func strategic(asked request) (answer, error) {
	object, err := asked.typed()
	if err != nil {
		return answer{}, err
	}
	original, patch := map[string]any{}, map[string]any{}
	must(json.Unmarshal(asked.Object, &original))
	must(json.Unmarshal(asked.Patch, &patch))
	patched, err := strategicpatch.StrategicMergeMapPatch(original, patch, object)
	if err != nil {
		return answer{}, err
	}
	text, err := json.Marshal(patched)
	return answer{Object: text}, err
}

func jsonPatch(asked request) (answer, error) {
	patch, err := jsonpatch.DecodePatch(asked.Patch)
	if err != nil {
		return answer{}, err
	}
	text, err := patch.Apply(asked.Object)
	return answer{Object: text}, err
}

func mergePatch(asked request) (answer, error) {
	text, err := jsonpatch.MergePatch(asked.Object, asked.Patch)
	return answer{Object: text}, err
}

func quantity(asked request) (answer, error) {
	parsed, err := resource.ParseQuantity(asked.Text)
	return answer{Text: parsed.String()}, err
}

func fieldManager(asked request) (*managedfields.FieldManager, *unstructured.Unstructured, *unstructured.Unstructured) {
	live, given := &unstructured.Unstructured{}, &unstructured.Unstructured{}
	must(kjson.UnmarshalCaseSensitivePreserveInts(asked.Object, &live.Object))
	must(kjson.UnmarshalCaseSensitivePreserveInts(asked.Patch, &given.Object))
	return managedfieldstest.NewFakeFieldManager(converter, asked.gvk()), live, given
}

func apply(asked request) (answer, error) {
	manager, live, given := fieldManager(asked)
	result, err := manager.Apply(live, given, asked.Manager, asked.Force)
	return tracked(result, err)
}

func update(asked request) (answer, error) {
	manager, live, given := fieldManager(asked)
	result, err := manager.Update(live, given, asked.Manager)
	return tracked(result, err)
}

func tracked(object runtime.Object, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	text, err := json.Marshal(object)
	return answer{Object: []byte(strings.TrimSpace(string(text)))}, err
}
