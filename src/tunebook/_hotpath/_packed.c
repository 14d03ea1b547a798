/* The hot path's key in one step: all arguments of a call, described exactly, in one bytes object.
 *
 * Reading `.shape`, `.dtype` and `.flags` of three numpy arrays in Python is nine objects made and thrown away, and 0.6
 * of the 0.7 us that a tuned call takes. Here the same facts are copied from the arrays' own structs in 0.04 us. jax
 * arrays are asked as in Python, which is what most of the 0.3 us of a call with three of them goes to.
 *
 * No numpy headers: the fields read here are where they are in every numpy 1.x and 2.x (`adapters/numpy.py` asks
 * which major version it is), and headers would make numpy a build dependency. The limited API: one build for every CPython
 * from 3.11 on, and it costs no speed. It needs the GIL: without one, another thread may reshape an array meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* PyArray_Descr up to the last field that numpy 1 and 2 have in common. */
typedef struct {
    PyObject_HEAD
    PyTypeObject *scalar_type;
    char kind, character, byteorder, flags;
    int type_number;
} DType;

/* PyArrayObject, up to the last field needed. */
typedef struct {
    PyObject_HEAD
    char *data;
    int rank;
    Py_ssize_t *shape, *strides;
    PyObject *base;
    DType *dtype;
    int flags;
} Array;

enum {
    C_CONTIGUOUS = 1, /* of Array.flags */
    HALF = 23,        /* numbers of types: 0 to 16 are bool, integers, floats and complex, 23 came later */
    USER = 256,       /* registered by other packages, ml_dtypes for one: a number each, never given twice */
    USER_END = 2048,  /* numpy's own number for strings of any length, which differ by more than their number, is above */
    CAPACITY = 4096,  /* bytes of a key; what needs more is looked up as if this file were not there */
    DEPTH = 8,        /* of tuples in tuples */
    AVALS = 65536,    /* of jax, that is, shapes and dtypes; a program with more of them takes the pure-Python way */
};

/* One letter for dtypes that are equal: `long` is either `int` or `long long`, with a number of its own. 0: strings,
 * records, objects and dates, which have no fixed size or differ by more than their number. */
static const char NUMBERED[HALF + 1] = {
    [0] = '?', [1] = 'b', [2] = 'B', [3] = 'h', [4] = 'H', [5] = 'i', [6] = 'I',
    [7] = sizeof(long) == sizeof(int) ? 'i' : 'q',
    [8] = sizeof(long) == sizeof(int) ? 'I' : 'Q',
    [9] = 'q', [10] = 'Q', [11] = 'f', [12] = 'd', [13] = 'g', [14] = 'F', [15] = 'D', [16] = 'G', [HALF] = 'e',
};

typedef struct {
    char *at;
    const char *end;
    PyObject *ndarray; /* numpy's class, or None */
    int layout;        /* whether strides count */
    PyObject *jax;     /* None, or a tuple: see `packer` */
    PyObject *classes[2], *aval;
    int with_jax;      /* whether one was packed */
} Packing;

/* Every value starts with a byte that says what it is and, where that leaves its length open, with its length: no two
 * lists of arguments can have the same bytes. All of these return whether the value could be packed. */

static inline int pack_raw(Packing *to, const void *bytes, Py_ssize_t length)
{
    if (length > to->end - to->at)
        return 0;
    if (length > 0) /* numpy has NULL for the shape of a scalar, which memcpy may not be given */
        memcpy(to->at, bytes, (size_t)length);
    to->at += length;
    return 1;
}

static inline int pack_tag(Packing *to, char tag)
{
    return pack_raw(to, &tag, 1);
}

static inline int pack_text(Packing *to, char tag, const char *text, Py_ssize_t length)
{
    return pack_tag(to, tag) && pack_raw(to, &length, sizeof length) && pack_raw(to, text, length);
}

static inline int pack_dtype(Packing *to, const DType *dtype)
{
    if (dtype->byteorder != '=' && dtype->byteorder != '|')
        return 0;
    int number = dtype->type_number;
    if (number >= USER && number < USER_END)
        return pack_tag(to, 'u') && pack_raw(to, &number, sizeof number);
    return number >= 0 && number <= HALF && NUMBERED[number] != 0 && pack_tag(to, NUMBERED[number]);
}

static inline int pack_array(Packing *to, const Array *array)
{
    /* What is contiguous is told apart from what is not, and only the latter by its strides: those of a dimension of
     * size 1 may be anything, and say nothing. */
    int strided = to->layout && !(array->flags & C_CONTIGUOUS);
    unsigned char rank = (unsigned char)array->rank; /* at most 64 */
    Py_ssize_t bytes = array->rank * (Py_ssize_t)sizeof(Py_ssize_t);
    return pack_tag(to, strided ? 'S' : 'A') && pack_dtype(to, array->dtype) && pack_raw(to, &rank, 1)
           && pack_raw(to, array->shape, bytes) && (!strided || pack_raw(to, array->strides, bytes));
}

static int pack_int(Packing *to, PyObject *value)
{
    int overflow;
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && pack_tag(to, 'I') && pack_raw(to, &number, sizeof number);
}

static int pack_float(Packing *to, PyObject *value)
{
    double number = PyFloat_AsDouble(value);
    /* By its bits, since 0.0 == -0.0. Every NaN is one: else each new one would add an entry that is never found. */
    if (number != number)
        return pack_tag(to, 'X');
    return pack_tag(to, 'D') && pack_raw(to, &number, sizeof number);
}

static int pack_str(Packing *to, PyObject *value)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) { /* half of a surrogate pair */
        PyErr_Clear();
        return 0;
    }
    return pack_text(to, 'U', text, length);
}

static int pack_bytes(Packing *to, PyObject *value)
{
    char *text;
    Py_ssize_t length;
    return PyBytes_AsStringAndSize(value, &text, &length) == 0 && pack_text(to, 'B', text, length);
}

static int pack_value(Packing *to, PyObject *value, int depth);

static int pack_tuple(Packing *to, PyObject *value, int depth)
{
    Py_ssize_t length = PyTuple_Size(value);
    if (depth == DEPTH || !pack_tag(to, 'T') || !pack_raw(to, &length, sizeof length))
        return 0;
    for (Py_ssize_t i = 0; i < length; i++)
        if (!pack_value(to, PyTuple_GetItem(value, i), depth + 1))
            return 0;
    return 1;
}

/* Keep an aval alive for good, since its address stands for it in keys; 0 if there are too many. */
static int keep(PyObject *aval)
{
    static PyObject *kept; /* by address */
    if (kept == NULL && (kept = PyDict_New()) == NULL)
        return 0;
    PyObject *address = PyLong_FromVoidPtr(aval);
    if (address == NULL)
        return 0;
    int known = PyDict_Contains(kept, address);
    if (known == 0 && PyDict_Size(kept) < AVALS)
        known = PyDict_SetItem(kept, address, aval) == 0;
    Py_DecRef(address);
    return known == 1;
}

/* A jax array, or what stands for one in a trace, by the address of its aval: equal avals are one object. */
static int pack_jax(Packing *to, PyObject *value)
{
    static PyObject *seen[256]; /* some of those that are kept, by a part of their address */
    PyObject *aval = PyObject_GetAttr(value, to->aval);
    PyObject **place = &seen[((uintptr_t)aval >> 4) % 256];
    if (aval != NULL && *place != aval)
        *place = keep(aval) ? aval : NULL;
    int known = aval != NULL && *place == aval;
    Py_DecRef(aval); /* which does nothing with NULL */
    if (!known) {
        PyErr_Clear();
        return 0;
    }
    to->with_jax = 1;
    return pack_tag(to, 'J') && pack_raw(to, &aval, sizeof aval);
}

/* By exact class: a subclass may mean anything. */
static inline int pack_value(Packing *to, PyObject *value, int depth)
{
    PyTypeObject *kind = Py_TYPE(value);
    if ((PyObject *)kind == to->ndarray)
        return pack_array(to, (const Array *)value);
    if ((PyObject *)kind == to->classes[0] || (PyObject *)kind == to->classes[1])
        return pack_jax(to, value);
    if (kind == &PyLong_Type)
        return pack_int(to, value);
    if (kind == &PyBool_Type)
        return pack_tag(to, value == Py_True ? '1' : '0');
    if (value == Py_None)
        return pack_tag(to, 'N');
    if (kind == &PyFloat_Type)
        return pack_float(to, value);
    if (kind == &PyUnicode_Type)
        return pack_str(to, value);
    if (kind == &PyBytes_Type)
        return pack_bytes(to, value);
    return kind == &PyTuple_Type && pack_tuple(to, value, depth);
}

/* What a call with jax arrays depends on beside its arguments: its settings. A number stands for them as long as they
 * are the same in all threads; if it is 0, what stands for those of a thread is read by its `value`, 20 to 40 ns each. */
static int pack_settings(Packing *to)
{
    PyObject *cell = PyList_GetItem(PyTuple_GetItem(to->jax, 4), 0);
    long number = cell == NULL ? -1 : PyLong_AsLong(cell);
    if (number < 0) {
        PyErr_Clear();
        return 0;
    }
    if (number > 0)
        return pack_tag(to, 'G') && pack_raw(to, &number, sizeof number);
    Py_ssize_t count = PyTuple_Size(to->jax);
    for (Py_ssize_t i = 5; i < count; i++) {
        PyObject *value = PyObject_GetAttr(PyTuple_GetItem(to->jax, i), PyTuple_GetItem(to->jax, 3));
        if (value == NULL) {
            PyErr_Clear();
            return 0;
        }
        int packed = pack_value(to, value, 0);
        Py_DecRef(value);
        if (!packed)
            return 0;
    }
    return 1;
}

/* Return the key of a call, or NULL: with an error set if there is no memory for it, and with none if an argument cannot
 * be packed. */
static inline PyObject *pack(PyObject *self, PyObject *const *arguments, Py_ssize_t count, int layout)
{
    char packed[CAPACITY];
    PyObject *jax = PyTuple_GetItem(self, 1);
    Packing to = {packed, packed + CAPACITY, PyTuple_GetItem(self, 0), layout, jax, {NULL, NULL}, NULL, 0};
    if (jax != Py_None) {
        to.classes[0] = PyTuple_GetItem(jax, 0);
        to.classes[1] = PyTuple_GetItem(jax, 1);
        to.aval = PyTuple_GetItem(jax, 2);
    }
    int done = 1;
    for (Py_ssize_t i = 0; i < count && done; i++)
        done = pack_value(&to, arguments[i], 0);
    if (!done || (to.with_jax && !pack_settings(&to)))
        return NULL;
    return PyBytes_FromStringAndSize(packed, to.at - packed);
}

static PyObject *or_none(PyObject *found)
{
    if (found == NULL && PyErr_Occurred() == NULL) {
        /* The function: the macro of 3.11 would count up what is immortal from 3.12 on. */
        Py_IncRef(Py_None);
        return Py_None;
    }
    return found;
}

/* An answer that comes with a function to call first, as all do while somebody listens: `told` has pairs of the two.
 * NULL without an error if there is no such answer, or if `scoped` says that another one may be in force here. */
static PyObject *find_told(PyObject *told, PyObject *scoped, PyObject *key)
{
    if (told == Py_None || PyDict_Size(told) == 0)
        return NULL;
    PyObject *answer = PyDict_GetItemWithError(told, key);
    if (answer == NULL)
        return NULL;
    if (!PyTuple_Check(answer) || PyTuple_Size(answer) != 2)
        return PyErr_Format(PyExc_TypeError, "finder takes a dict of pairs; got %R", answer);
    Py_IncRef(answer); /* the functions may make the memo forget it */
    PyObject *scope = PyObject_CallNoArgs(scoped);
    PyObject *said = scope == Py_None ? PyObject_CallNoArgs(PyTuple_GetItem(answer, 1)) : NULL;
    PyObject *found = said == NULL ? NULL : PyTuple_GetItem(answer, 0);
    if (found != NULL)
        Py_IncRef(found);
    Py_DecRef(said); /* which does nothing with NULL; and so below */
    Py_DecRef(scope);
    Py_DecRef(answer);
    return found;
}

/* What a memo has for a call, or else what a function says about its key. The lookup is in here because calling `memo.get`
 * from Python takes another 30 ns. */
static inline PyObject *find(PyObject *self, PyObject *const *arguments, Py_ssize_t count, int layout)
{
    PyObject *key = pack(self, arguments, count, layout);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(PyTuple_GetItem(self, 2), key);
    if (found != NULL)
        Py_IncRef(found);
    else if (key != NULL && PyErr_Occurred() == NULL) {
        found = find_told(PyTuple_GetItem(self, 4), PyTuple_GetItem(self, 5), key);
        if (found == NULL && PyErr_Occurred() == NULL)
            found = PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, 3), key, NULL);
    }
    Py_DecRef(key); /* which does nothing with NULL */
    return found;
}

/* A function of the table below, with the layout as a constant: the compiler makes a copy of the whole for each. */
#define METHOD(NAME, function, layout, text) \
    static PyObject *function##_##layout(PyObject *self, PyObject *const *arguments, Py_ssize_t count) \
    { \
        return or_none(function(self, arguments, count, layout)); \
    } \
    static PyMethodDef NAME = { \
        #function, (PyCFunction)(void (*)(void))function##_##layout, METH_FASTCALL, PyDoc_STR(text)}

#define PACKS "Return bytes that are equal for two calls only if their arguments are; None if one cannot be packed."
#define FINDS "Return the entry under the packed arguments; None without one, or if an argument cannot be packed."
METHOD(WITH_LAYOUT, pack, 1, PACKS);
METHOD(WITHOUT_LAYOUT, pack, 0, PACKS);
METHOD(FIND_WITH_LAYOUT, find, 1, FINDS);
METHOD(FIND_WITHOUT_LAYOUT, find, 0, FINDS);

/* Return a function whose `self` is a tuple of the objects that it needs: they live as long as the function, and there
 * is no state to set up. It takes the reference to the tuple. */
static PyObject *function_of(PyMethodDef *method, PyObject *self)
{
    PyObject *made = self == NULL ? NULL : PyCFunction_NewEx(method, self, NULL);
    Py_DecRef(self); /* which does nothing with NULL */
    return made;
}

static PyObject *packer(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *ndarray, *jax = Py_None;
    int layout;
    if (!PyArg_ParseTuple(arguments, "Op|O:packer", &ndarray, &layout, &jax))
        return NULL;
    /* Any class made by Python code, by the name of `numpy.ndarray` or not, has instances that must not be read so. */
    int builtin = PyType_Check(ndarray) && !(PyType_GetFlags((PyTypeObject *)ndarray) & Py_TPFLAGS_HEAPTYPE);
    if (ndarray != Py_None && !builtin)
        return PyErr_Format(PyExc_TypeError, "packer takes numpy's ndarray class, or None; got %R", ndarray);
    if (jax != Py_None && !(PyTuple_Check(jax) && PyTuple_Size(jax) >= 5 && PyList_Check(PyTuple_GetItem(jax, 4))))
        return PyErr_Format(PyExc_TypeError, "packer takes five things or more about jax, or None; got %R", jax);
    return function_of(layout ? &WITH_LAYOUT : &WITHOUT_LAYOUT, PyTuple_Pack(2, ndarray, jax));
}

static PyObject *finder(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *packing, *memo, *otherwise, *told = Py_None, *scoped = Py_None;
    if (!PyArg_ParseTuple(arguments, "OO!O|O!O:finder", &packing, &PyDict_Type, &memo, &otherwise, &PyDict_Type, &told,
                          &scoped))
        return NULL;
    PyCFunction function = Py_TYPE(packing) == &PyCFunction_Type ? PyCFunction_GetFunction(packing) : NULL;
    int layout = function == WITH_LAYOUT.ml_meth;
    if (!layout && function != WITHOUT_LAYOUT.ml_meth)
        return PyErr_Format(PyExc_TypeError, "finder takes what packer returned; got %R", packing);
    PyObject *of = PyCFunction_GetSelf(packing);
    PyObject *self = PyTuple_Pack(
        6, PyTuple_GetItem(of, 0), PyTuple_GetItem(of, 1), memo, otherwise, told, scoped);
    return function_of(layout ? &FIND_WITH_LAYOUT : &FIND_WITHOUT_LAYOUT, self);
}

static PyMethodDef FUNCTIONS[] = {
    {"packer", packer, METH_VARARGS,
     PyDoc_STR("packer(ndarray, layout, jax=None) returns the function that packs arguments, with the layout of arrays "
               "or not. jax is (array class, tracer class, 'aval', 'value', [number], *settings); the settings have a "
               "`value`, and are read where the number is 0.")},
    {"finder", finder, METH_VARARGS,
     PyDoc_STR("finder(pack, memo, otherwise, told, scoped) returns the function that looks arguments up by what pack "
               "makes of them: in a dict, or else by calling otherwise. told has pairs (entry, tell): where scoped() is "
               "None, it calls tell and returns the entry.")},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "tunebook._hotpath._packed", .m_methods = FUNCTIONS, .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__packed(void)
{
    return PyModuleDef_Init(&MODULE);
}
